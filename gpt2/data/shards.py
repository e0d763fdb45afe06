"""Files of a data set while it is written: token shards, document indexes, and checkpoints.

A checkpoint records the size and SHA-256 of each file, and the position of the stream. Bytes written
after it are truncated on resume, so the result is byte-identical wherever the preparation was killed.
"""

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpt2.data.split import Document, folded_digest, text_digest, without_invisible
from gpt2.data.tokenizer import Tokenizer
from lib.errors import DataError, Problem
from lib.files import canonical_json

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
        if path.exists():
            self._stream = open(path, "r+b")  # noqa: SIM115
            self._stream.truncate(kept["bytes"])
            while piece := self._stream.read(1 << 20):
                self._hash.update(piece)
                self._bytes += len(piece)
        if {"bytes": self._bytes, "sha256": self._hash.hexdigest()} != kept:
            remedy = f"type: rm -r {shlex.quote(str(path.parent))} && make data"
            what = "cannot resume the preparation: file differs from the checkpoint"
            raise DataError(Problem(what, str(path), remedy, code="data.damaged"))

    def write(self, content: bytes) -> None:
        self._stream.write(content)
        self._hash.update(content)
        self._bytes += len(content)

    def sync(self) -> dict[str, Any]:
        """Write the file to the disk and return its size and SHA-256 so far."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def close(self) -> dict[str, Any]:
        digest = self.sync()
        self._stream.close()
        return digest

    def discard(self) -> None:
        """Close a file that will be deleted; errors of a full disk are ignored."""
        with contextlib.suppress(OSError):
            self._stream.close()


class SplitWriter:
    """Writer of one split: shards of little-endian 16-bit ids, and one index line per document.

    It starts empty, or resumes from ``kept``, a result of ``checkpoint``, with counts and digests
    computed from the files. Raises DataError if one of them is missing or damaged.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        vocab_size: int,
        documents: bool,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.tokens = 0
        self.text_bytes = kept["text_bytes"] if kept else 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.files: dict[str, dict[str, Any]] = {}
        # Of the documents in order: SHA-256 of each text, and digests of the folded texts.
        self._digests = bytearray()
        self._folded = bytearray()
        self._folder = folder
        self._shard: HashedFile | None = None
        self._index_path = folder / f"{name}-documents.jsonl"
        for shard, state in sorted(kept["shards"].items()) if kept else ():
            self._close_shard()
            self._shard = HashedFile(folder / shard, state)
            self._count(np.fromfile(folder / shard, dtype="<u2"))
        self._index = HashedFile(self._index_path, kept and kept["index"]) if documents else None
        for line in read_index(self._index_path) if kept else ():
            self._digests += bytes.fromhex(line["sha256"])
            self._folded += bytes.fromhex(line["folded"])

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
        while tokens.size:
            number, filled = divmod(self.tokens, SHARD_TOKENS)
            if filled == 0:
                self._close_shard()
                self._shard = HashedFile(self._folder / f"{self.name}-{number:05d}.bin")
            assert self._shard is not None
            piece, tokens = np.split(tokens, [min(tokens.size, SHARD_TOKENS - filled)])
            self._shard.write(piece.astype("<u2").tobytes())
            self._count(piece)

    def _count(self, tokens: np.ndarray) -> None:
        self.counts += np.bincount(tokens, minlength=self.counts.size)
        self.tokens += tokens.size

    def add_document(self, document: Document, words: Tokenizer, is_own: bool = False) -> None:
        """Append a document: the tokens of its text with end of text, and its index line.

        Of your own text, the proof of the split ignores invisible characters too. The digest in the
        index does not, because it is part of the data set's digest.
        """
        assert self._index is not None
        tokens = np.append(words.encode(document.text), np.uint16(words.end_of_text))
        digest, folded = text_digest(document.text), folded_digest(document.text)
        line = {
            "folded": folded.hex(),
            "id": document.id,
            "length": tokens.size,
            "offset": self.tokens,
            "sha256": digest.hex(),
        }
        self._index.write(canonical_json(line).encode() + b"\n")
        self.add(tokens)
        self._digests += digest
        self._folded += folded_digest(without_invisible(document.text)) if is_own else folded
        self.text_bytes += len(document.text.encode())

    def note_document(self, digest: bytes) -> None:
        """Count a document of a token file, which has no name and no text."""
        self._digests += digest

    def names(self, positions: Sequence[int]) -> list[str]:
        """Return the names of the documents at ``positions``, after ``close``."""
        if self._index is None or not positions:
            return [f"document {position}" for position in positions]
        names = {i: d["id"] for i, d in enumerate(read_index(self._index_path)) if i in positions}
        return [names[position] for position in positions]

    def checkpoint(self) -> dict[str, Any]:
        """Write everything to the disk and return the state to resume from."""
        assert self._index is not None
        files = dict(self.files)
        if self._shard is not None:
            files[self._shard.name] = self._shard.sync()
        return {"shards": files, "index": self._index.sync(), "text_bytes": self.text_bytes}

    def close(self) -> dict[str, Any]:
        """Close all files and return the manifest entry of this split."""
        self._close_shard()
        entry: dict[str, Any] = {"tokens": self.tokens, "shards": list(self.files)}
        if self._index is None:
            return entry | {"documents": None, "index": None}
        self.files[self._index_path.name] = self._index.close()
        distinct = np.unique(self.digests)
        return entry | {
            "index": self._index_path.name,
            "documents": self.digests.size,
            "distinct_documents": distinct.size,
            "documents_sha256": digest_of_digests(distinct),
            "text_bytes": self.text_bytes,
        }

    def discard(self) -> None:
        for file in filter(None, (self._shard, self._index)):
            file.discard()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.files[self._shard.name] = self._shard.close()


def digest_of_digests(distinct: np.ndarray) -> str:
    """Return the SHA-256 of sorted digests [documents] (32 bytes), in hex joined by newlines."""
    return hashlib.sha256(distinct.tobytes().hex("\n", 32).encode()).hexdigest()


def read_index(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a document index: id, offset and length in tokens, digests of the text."""
    with open(path, encoding="utf-8") as stream:
        yield from map(json.loads, stream)
