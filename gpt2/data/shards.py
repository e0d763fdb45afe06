"""Writing of a data set: token shards, document indexes, checkpoints, and the proof of the split.

A large data set is prepared with checkpoints in its folder. A checkpoint records the size and SHA-256
of each file, and the position of the stream. Bytes written after the checkpoint are truncated on
resume, so the result is byte-identical wherever the preparation was killed.

``check_split`` proves that the training and held-out splits share no document, and lists near
duplicates. A document is identified by its text; in a token file, a document is the tokens between
two end-of-text tokens.
"""

import contextlib
import hashlib
import json
import os
import shlex
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpt2.data.corpus import Document
from gpt2.data.hub import DocumentStream, HubCorpus
from lib.console import log
from lib.errors import DataError, Problem
from lib.files import canonical_json, write_json
from lib.units import format_duration, format_si

# 64 MiB of 16-bit ids per shard.
SHARD_TOKENS = 32 << 20


class HashedFile:
    """A file hashed while it is written, and fsynced when it is synced or closed."""

    def __init__(self, path: Path, kept: Mapping[str, Any] | None = None) -> None:
        """Create ``path``, or append after the part described by ``kept``, a result of ``sync``.

        Raises DataError if the file no longer starts with that part.
        """
        self.name = path.name
        self._hash = hashlib.sha256()
        self._bytes = 0
        if kept is None:
            self._stream: BinaryIO = open(path, "wb")  # noqa: SIM115 closed by close and discard
            return
        if not path.exists():
            raise _cannot_resume(path, "missing")
        self._stream = open(path, "r+b")  # noqa: SIM115
        self._stream.truncate(kept["bytes"])
        while piece := self._stream.read(1 << 20):
            self._hash.update(piece)
            self._bytes += len(piece)
        if self._digest() != kept:
            raise _cannot_resume(path, "file differs from the checkpoint")

    def write(self, content: bytes) -> None:
        """Append ``content``."""
        self._stream.write(content)
        self._hash.update(content)
        self._bytes += len(content)

    def sync(self) -> dict[str, Any]:
        """Write the file to the disk and return its size and SHA-256 so far."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._digest()

    def close(self) -> dict[str, Any]:
        """Sync and close the file; return its size and SHA-256."""
        digest = self.sync()
        self._stream.close()
        return digest

    def discard(self) -> None:
        """Close a file that will be deleted; errors of a full disk are ignored."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _digest(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


class SplitWriter:
    """Writer of one split: shards of little-endian 16-bit ids, and one index line per document."""

    def __init__(
        self,
        folder: Path,
        name: str,
        vocab_size: int,
        documents: bool,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Start empty, or resume from ``kept``, a result of ``checkpoint``.

        Raises DataError if a file of the checkpoint is missing or damaged.
        """
        self.name = name
        self.tokens = 0
        self.text_bytes = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.files: dict[str, dict[str, Any]] = {}
        # Concatenated digests of the documents in order: SHA-256 of the text, and digest of the
        # case-folded text.
        self._digests = bytearray()
        self._folded = bytearray()
        self._folder = folder
        self._shard: HashedFile | None = None
        self._index_name = f"{name}-documents.jsonl"
        self._index: HashedFile | None = None
        if kept is not None:
            self._resume(kept)
        elif documents:
            self._index = HashedFile(folder / self._index_name)

    @property
    def digests(self) -> np.ndarray:
        """Return the SHA-256 of each document's text [documents] (32 bytes each), in order."""
        return np.frombuffer(bytes(self._digests), dtype="S32")

    @property
    def folded(self) -> np.ndarray:
        """Return the digest of each folded text [documents] (16 bytes each); empty without text."""
        return np.frombuffer(bytes(self._folded), dtype="S16")

    def add(self, tokens: np.ndarray) -> None:
        """Append ``tokens`` [T] (uint16), starting a new shard when one is full."""
        self.counts += np.bincount(tokens, minlength=self.counts.size)
        while tokens.size:
            number, filled = divmod(self.tokens, SHARD_TOKENS)
            if filled == 0:
                self._close_shard()
                self._shard = HashedFile(self._folder / f"{self.name}-{number:05d}.bin")
            assert self._shard is not None
            piece, tokens = np.split(tokens, [min(tokens.size, SHARD_TOKENS - filled)])
            self._shard.write(piece.astype("<u2").tobytes())
            self.tokens += piece.size

    def add_document(self, name: str, text: bytes, folded: bytes, tokens: np.ndarray) -> None:
        """Append a document: its ``tokens`` [T] with end of text, and its index line.

        ``text`` is UTF-8; ``folded`` is the digest of the folded text.
        """
        assert self._index is not None
        digest = hashlib.sha256(text).digest()
        line = {
            "folded": folded.hex(),
            "id": name,
            "length": tokens.size,
            "offset": self.tokens,
            "sha256": digest.hex(),
        }
        self._index.write(canonical_json(line).encode() + b"\n")
        self.add(tokens)
        self._digests += digest
        self._folded += folded
        self.text_bytes += len(text)

    def note_document(self, digest: bytes) -> None:
        """Count a document of a token file (without name and text)."""
        self._digests += digest

    def names(self, positions: Sequence[int]) -> list[str]:
        """Return the names of the documents at ``positions``. Call after ``close``."""
        if self._index is None:
            return [f"document {position}" for position in positions]
        names = dict.fromkeys(positions, "")
        for position, line in enumerate(read_index(self._folder / self._index_name)):
            if position in names:
                names[position] = line["id"]
        return [names[position] for position in positions]

    def checkpoint(self) -> dict[str, Any]:
        """Write everything to the disk and return the state needed to resume from here."""
        assert self._index is not None
        files = dict(self.files)
        if self._shard is not None:
            files[self._shard.name] = self._shard.sync()
        index = self._index.sync()
        return {"shards": files, "index": index, "text_bytes": self.text_bytes}

    def close(self) -> dict[str, Any]:
        """Close all files and return the manifest entry of this split."""
        self._close_shard()
        shards = list(self.files)
        if self._index is None:
            return {"tokens": self.tokens, "shards": shards, "documents": None, "index": None}
        self.files[self._index_name] = self._index.close()
        distinct = np.unique(self.digests)
        return {
            "tokens": self.tokens,
            "shards": shards,
            "index": self._index_name,
            "documents": len(self._digests) // 32,
            "distinct_documents": distinct.size,
            "documents_sha256": digest_of_digests(distinct),
            "text_bytes": self.text_bytes,
        }

    def discard(self) -> None:
        """Close open files without syncing; the caller deletes the folder."""
        for file in (self._shard, self._index):
            if file is not None:
                file.discard()

    def _resume(self, checkpoint: Mapping[str, Any]) -> None:
        """Open the files of ``checkpoint`` and recompute counts and digests from their content."""
        self.text_bytes = checkpoint["text_bytes"]
        for name, shard in sorted(checkpoint["shards"].items()):
            self._close_shard()
            path = self._folder / name
            self._shard = HashedFile(path, shard)
            tokens = np.fromfile(path, dtype="<u2")
            self.counts += np.bincount(tokens, minlength=self.counts.size)
            self.tokens += tokens.size
        self._index = HashedFile(self._folder / self._index_name, checkpoint["index"])
        for line in read_index(self._folder / self._index_name):
            self._digests += bytes.fromhex(line["sha256"])
            self._folded += bytes.fromhex(line["folded"])

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.files[self._shard.name] = self._shard.close()


def digest_of_digests(distinct: np.ndarray) -> str:
    """Return the SHA-256 of sorted digests [documents] (32 bytes), in hex joined by newlines."""
    return hashlib.sha256(distinct.tobytes().hex("\n", 32).encode()).hexdigest()


def read_index(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a document index: id, offset and length in tokens, digests of the text."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def _cannot_resume(path: Path, reason: str) -> DataError:
    remedy = f"type: rm -r {shlex.quote(str(path.parent))} && make data"
    what = f"cannot resume the preparation: {reason}"
    return DataError(Problem(what, str(path), remedy, code="data.damaged"))


CHECKPOINT = "checkpoint.json"
# About ten seconds of work.
CHECKPOINT_TOKENS = 8 << 20
_PROGRESS_INTERVAL_SECONDS = 5.0


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the last checkpoint in ``folder``; None if there is none."""
    path = folder / CHECKPOINT
    return json.loads(path.read_bytes()) if path.exists() else None


def stream_documents(
    corpus: HubCorpus,
    folder: Path,
    sides: Mapping[str, SplitWriter],
    add: Callable[[Document], object],
) -> str:
    """Call ``add`` with documents until the training split has ``corpus.tokens`` tokens.

    ``sides`` are the writers, restored to the last checkpoint of ``folder``. Documents are never
    cut, so the last one may exceed the budget. Returns the commit that was read. Raises DataError
    if the source cannot be read.
    """
    state = read_checkpoint(folder)
    saved_tokens = _tokens(sides)
    try:
        stream = DocumentStream(corpus, *(state["commit"], state["position"]) if state else ())
        train = sides["train"]
        progress = PreparationProgress(corpus.tokens, "training tokens", train.tokens)
        # No document is fetched once the budget is reached.
        documents = iter(stream)
        while (tokens := train.tokens) < corpus.tokens:
            document = next(documents, None)
            if document is None:
                _warn_exhausted(corpus, tokens)
                break
            add(document)
            progress.advance(train.tokens - tokens)
            if _tokens(sides) - saved_tokens >= CHECKPOINT_TOKENS:
                _checkpoint(folder, sides, stream)
                saved_tokens = _tokens(sides)
        return stream.commit
    except KeyboardInterrupt:
        log("STOP", f"{format_si(saved_tokens)} tokens saved; to resume, type: make data")
        raise


def _checkpoint(folder: Path, sides: Mapping[str, SplitWriter], stream: DocumentStream) -> None:
    state = {
        "commit": stream.commit,
        "position": stream.position(),
        "sides": {name: side.checkpoint() for name, side in sides.items()},
    }
    write_json(folder / CHECKPOINT, state)


def _tokens(sides: Mapping[str, SplitWriter]) -> int:
    return sum(side.tokens for side in sides.values())


def _warn_exhausted(corpus: HubCorpus, tokens: int) -> None:
    what = f"{corpus.place} is exhausted (DATASET_TOKENS={corpus.tokens}, got {tokens})"
    log("WARN", what)


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


# 128 bits: two of 10^12 texts collide by chance once in 10^15 data sets.
_FOLDED_BYTES = 16
# Pairs listed by name; further pairs are only counted.
_MAX_NAMED_PAIRS = 10


def folded_digest(text: str) -> bytes:
    """Return a digest of ``text`` [16 bytes] that ignores case, whitespace and Unicode forms."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.sha256(folded.encode()).digest()[:_FOLDED_BYTES]


class DocumentSplitter:
    """Splitter of a token file into documents; ``note`` receives the SHA-256 of each document."""

    def __init__(self, end_of_text: int, note: Callable[[bytes], None]) -> None:
        self._end_of_text = end_of_text
        self._note = note
        self._open: list[np.ndarray] = []

    def add(self, tokens: np.ndarray) -> None:
        """Process the next chunk ``tokens`` [T] (uint16)."""
        ends = np.flatnonzero(tokens == self._end_of_text)
        *complete, rest = np.split(tokens, ends + 1)
        for piece in complete:
            self._open.append(piece[:-1])
            self.end()
        self._open.append(rest)

    def end(self) -> None:
        """End the current document; an empty document is skipped."""
        content = b"".join(piece.astype("<u2").tobytes() for piece in self._open)
        self._open.clear()
        if content:
            self._note(hashlib.sha256(content).digest())


def check_split(train: SplitWriter, val: SplitWriter) -> dict[str, Any]:
    """Check two closed splits for shared documents and return the manifest's ``split.proof``.

    Documents that differ only in case and whitespace are listed and logged; they are not an error.
    Token files contain no text, so near duplicates cannot be checked there; that is logged too.
    Raises DataError if the splits share a document.
    """
    if shared := _shared_positions(train.digests, val.digests):
        raise DataError(*_overlap_problems(train, val, shared))
    if not train.folded.size:
        log("WARN", "token files contain no text: near duplicates were not checked")
    digests = {side.name: digest_of_digests(np.unique(side.digests)) for side in (train, val)}
    return {
        "unit": "document",
        "documents": {side.name: side.digests.size for side in (train, val)},
        "overlap": 0,
        "near_duplicates": _near_duplicates(train, val) if train.folded.size else None,
        "digest": hashlib.sha256(
            "\n".join(f"{name}:{digest}" for name, digest in digests.items()).encode()
        ).hexdigest(),
    }


def _shared_positions(train: np.ndarray, val: np.ndarray) -> list[tuple[int, int]]:
    """Return the first position in ``train`` and in ``val`` of each shared digest, in order."""
    _, first, second = np.intersect1d(train, val, return_indices=True)
    return sorted(zip(first.tolist(), second.tolist(), strict=True))


def _pair_names(
    train: SplitWriter, val: SplitWriter, pairs: list[tuple[int, int]]
) -> list[dict[str, str]]:
    """Return the document names of the first pairs."""
    if not pairs:
        return []
    train_positions, val_positions = zip(*pairs[:_MAX_NAMED_PAIRS], strict=True)
    names = zip(train.names(train_positions), val.names(val_positions), strict=True)
    return [{"train": train_name, "val": val_name} for train_name, val_name in names]


def _overlap_problems(
    train: SplitWriter, val: SplitWriter, pairs: list[tuple[int, int]]
) -> list[Problem]:
    remedy = "remove each shared document from one split, and type: make data"
    problems = [
        Problem(
            f"training document {pair['train']} is identical to held-out document {pair['val']}",
            code="data.split-overlap",
        )
        for pair in _pair_names(train, val, pairs)
    ]
    total = f"{len(pairs)} document(s) in both the training and the held-out split"
    return [*problems, Problem(total, next=remedy, code="data.split-overlap")]


def _near_duplicates(train: SplitWriter, val: SplitWriter) -> dict[str, Any]:
    pairs = _shared_positions(train.folded, val.folded)
    names = _pair_names(train, val, pairs)
    if names:
        example = f"{names[0]['train']} and {names[0]['val']}"
        log(
            "WARN",
            f"{len(pairs)} near-duplicate document(s) across the splits (equal except for case and "
            f"whitespace), for example {example}: see split.proof in the data set's manifest",
        )
    return {
        "rule": "equal in NFKC, case folded, blanks as one",
        "count": len(pairs),
        "pairs": names,
    }
