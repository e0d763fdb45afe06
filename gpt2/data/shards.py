"""Writing one side of a data set: token shards and the index of its documents."""

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lib.errors import DataError, Problem
from lib.files import canonical_json

# 64 MiB of 16-bit ids in a shard.
SHARD_TOKENS = 32 << 20


class DigestedFile:
    """A file that is hashed as it is written and is on the disk once it is synced or closed."""

    def __init__(self, path: Path, kept: Mapping[str, Any] | None = None) -> None:
        """Begin ``path`` anew, or go on behind the part of it that ``sync`` described.

        Raises DataError where that part is no longer what it was.
        """
        self.name = path.name
        self._hash = hashlib.sha256()
        self._bytes = 0
        if kept is None:
            self._stream: BinaryIO = open(path, "wb")
            return
        if not path.exists():
            raise _damaged(path, "it is missing")
        self._stream = open(path, "r+b")
        self._stream.truncate(kept["bytes"])
        while piece := self._stream.read(1 << 20):
            self._hash.update(piece)
            self._bytes += len(piece)
        if self._digest() != kept:
            raise _damaged(path, "it is not what the checkpoint says")

    def write(self, content: bytes) -> None:
        """Append ``content``."""
        self._stream.write(content)
        self._hash.update(content)
        self._bytes += len(content)

    def sync(self) -> dict[str, Any]:
        """Put it on the disk; the size and SHA-256 so far."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._digest()

    def close(self) -> dict[str, Any]:
        """Sync and close; the file's size and SHA-256."""
        found = self.sync()
        self._stream.close()
        return found

    def discard(self) -> None:
        """Close a file that will be thrown away; what a full disk cannot take no longer matters."""
        with contextlib.suppress(OSError):
            self._stream.close()

    def _digest(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}


class SplitWriter:
    """One side of the split: shards of little-endian 16-bit ids, and a line for each document."""

    def __init__(
        self,
        folder: Path,
        name: str,
        vocab_size: int,
        documents: bool,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin anew, or where ``checkpoint`` returned ``kept``. DataError on a damaged file."""
        self.name = name
        self.tokens = 0
        self.text_bytes = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.files: dict[str, dict[str, Any]] = {}
        # Of each document, one behind the other in the order they came: the SHA-256 of its text,
        # and the digest of it folded.
        self._digests = bytearray()
        self._folded = bytearray()
        self._folder = folder
        self._shard: DigestedFile | None = None
        self._index_name = f"{name}-documents.jsonl"
        self._index: DigestedFile | None = None
        if kept is not None:
            self._go_on(kept)
        elif documents:
            self._index = DigestedFile(folder / self._index_name)

    @property
    def digests(self) -> np.ndarray:
        """The SHA-256 of each document's text [documents] (32 bytes each), in their order."""
        return np.frombuffer(bytes(self._digests), dtype="S32")

    @property
    def folded(self) -> np.ndarray:
        """The digest of each folded text [documents] (16 bytes each); none of token files."""
        return np.frombuffer(bytes(self._folded), dtype="S16")

    def add(self, tokens: np.ndarray) -> None:
        """Append ``tokens`` [T] (uint16), cutting shards where they are full."""
        self.counts += np.bincount(tokens, minlength=self.counts.size)
        while tokens.size:
            number, filled = divmod(self.tokens, SHARD_TOKENS)
            if filled == 0:
                self._close_shard()
                self._shard = DigestedFile(self._folder / f"{self.name}-{number:05d}.bin")
            assert self._shard is not None
            piece, tokens = np.split(tokens, [min(tokens.size, SHARD_TOKENS - filled)])
            self._shard.write(piece.astype("<u2").tobytes())
            self.tokens += piece.size

    def add_document(self, name: str, text: bytes, folded: bytes, tokens: np.ndarray) -> None:
        """Append a document: its ``tokens`` [T], the end of text included, and its index line.

        ``text`` is UTF-8, ``folded`` the digest of it folded.
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
        """Count a document of a token file, which has neither name nor text."""
        self._digests += digest

    def names(self, positions: Sequence[int]) -> list[str]:
        """What the documents at ``positions`` are called, once this side is closed."""
        if self._index is None:
            return [f"document {position}" for position in positions]
        wanted = dict.fromkeys(positions, "")
        for position, line in enumerate(read_index(self._folder / self._index_name)):
            if position in wanted:
                wanted[position] = line["id"]
        return [wanted[position] for position in positions]

    def checkpoint(self) -> dict[str, Any]:
        """Put everything on the disk; what another process needs to go on from here."""
        assert self._index is not None
        files = dict(self.files)
        if self._shard is not None:
            files[self._shard.name] = self._shard.sync()
        index = self._index.sync()
        return {"shards": files, "index": index, "text_bytes": self.text_bytes}

    def close(self) -> dict[str, Any]:
        """Close all files; what the manifest says of this side."""
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
        """Let go of the open files; what was written is thrown away with its folder."""
        for file in (self._shard, self._index):
            if file is not None:
                file.discard()

    def _go_on(self, kept: Mapping[str, Any]) -> None:
        """Open the files as they were, and count again what they hold."""
        self.text_bytes = kept["text_bytes"]
        for name, facts in sorted(kept["shards"].items()):
            self._close_shard()
            path = self._folder / name
            self._shard = DigestedFile(path, facts)
            tokens = np.fromfile(path, dtype="<u2")
            self.counts += np.bincount(tokens, minlength=self.counts.size)
            self.tokens += tokens.size
        self._index = DigestedFile(self._folder / self._index_name, kept["index"])
        for line in read_index(self._folder / self._index_name):
            self._digests += bytes.fromhex(line["sha256"])
            self._folded += bytes.fromhex(line["folded"])

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.files[self._shard.name] = self._shard.close()


def digest_of_digests(distinct: np.ndarray) -> str:
    """SHA-256 of sorted digests [documents] (32 bytes each): in hex, joined by line ends."""
    return hashlib.sha256(distinct.tobytes().hex("\n", 32).encode()).hexdigest()


def read_index(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a document index: id, offset and length in tokens, sha256 of the text."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def _damaged(path: Path, what: str) -> DataError:
    """An unfinished data set that cannot be gone on with."""
    remedy = f"type: rm -r {shlex.quote(str(path.parent))} && make data"
    return DataError(Problem(f"cannot go on: {what}", str(path), remedy))
