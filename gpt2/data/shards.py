"""Writing one side of a data set: token shards and the index of its documents."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lib.files import canonical_json

# 64 MiB of 16-bit ids in a shard.
SHARD_TOKENS = 32 << 20


class DigestedFile:
    """A file that is hashed as it is written and is on the disk once it is closed."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._stream: BinaryIO = open(path, "wb")
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, content: bytes) -> None:
        """Append ``content``."""
        self._stream.write(content)
        self._hash.update(content)
        self._bytes += len(content)

    def close(self) -> dict[str, Any]:
        """Sync and close; the file's size and SHA-256."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def discard(self) -> None:
        """Close a file that will be thrown away; what a full disk cannot take no longer matters."""
        with contextlib.suppress(OSError):
            self._stream.close()


class SplitWriter:
    """One side of the split: shards of little-endian 16-bit ids, and a line for each document."""

    def __init__(self, folder: Path, name: str, vocab_size: int, documents: bool) -> None:
        self.name = name
        self.tokens = 0
        self.text_bytes = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        # SHA-256 of each document's text, in the order they came.
        self.digests: list[str] = []
        self.files: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._shard: DigestedFile | None = None
        self._index_name = f"{name}-documents.jsonl"
        self._index = DigestedFile(folder / self._index_name) if documents else None

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

    def add_document(self, name: str, digest: str, text_bytes: int, tokens: np.ndarray) -> None:
        """Append a document: its ``tokens`` [T], the end of text included, and its index line."""
        assert self._index is not None
        line = {"id": name, "length": tokens.size, "offset": self.tokens, "sha256": digest}
        self._index.write(canonical_json(line).encode() + b"\n")
        self.add(tokens)
        self.digests.append(digest)
        self.text_bytes += text_bytes

    def close(self) -> dict[str, Any]:
        """Close all files; what the manifest says of this side."""
        self._close_shard()
        shards = list(self.files)
        if self._index is None:
            return {"tokens": self.tokens, "shards": shards, "documents": None, "index": None}
        self.files[self._index_name] = self._index.close()
        return {
            "tokens": self.tokens,
            "shards": shards,
            "index": self._index_name,
            "documents": len(self.digests),
            "distinct_documents": len(set(self.digests)),
            "documents_sha256": digest_of_digests(self.digests),
            "text_bytes": self.text_bytes,
        }

    def discard(self) -> None:
        """Let go of the open files; what was written is thrown away with its folder."""
        for file in (self._shard, self._index):
            if file is not None:
                file.discard()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self.files[self._shard.name] = self._shard.close()


def digest_of_digests(digests: list[str]) -> str:
    """SHA-256 of the distinct digests, sorted and joined by line ends."""
    return hashlib.sha256("\n".join(sorted(set(digests))).encode()).hexdigest()


def read_index(path: Path) -> list[dict[str, Any]]:
    """The lines of a document index: id, offset and length in tokens, sha256 of the text."""
    with open(path, encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]
