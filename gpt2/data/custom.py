"""A person's own data: text files, JSON lines, or token files that are split already."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.corpus import Document
from gpt2.data.packages import Package
from lib.errors import DataError, Problem
from lib.files import sha256

_SUFFIX = {"text": ".txt", "jsonl": ".jsonl"}
# Tokens read at a time from a token file (8 MiB).
_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class SourceFile:
    """A file as it was found: its name within the data set, size and digest."""

    path: Path
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's own name; the folder it stands in changes nothing."""
        return self.path.name


@dataclass(frozen=True)
class Files:
    """What every custom data set has: files with their digests, and no packages."""

    files: tuple[SourceFile, ...]
    # Files of documents that were given to be held out; without any, the hash of a text decides.
    held_out: tuple[SourceFile, ...] = ()
    packages: tuple[Package, ...] = ()

    def identity(self) -> Any:
        """The files' names and digests, side by side."""
        return [[[f.name, f.sha256] for f in side] for side in (self.files, self.held_out)]

    def provenance(self) -> list[dict[str, Any]]:
        """Name, size and digest of each file, and its side where that was given."""
        return [
            {"file": f.name, "bytes": f.bytes, "sha256": f.sha256}
            | ({} if held_out is None else {"split": "val" if held_out else "train"})
            for f, held_out in self.sided()
        ]

    def text_bytes(self, downloads: Path) -> int:
        """The files' size."""
        return sum(f.bytes for f, _ in self.sided())

    def sided(self) -> Iterator[tuple[SourceFile, bool | None]]:
        """Each file, and whether it is to be held out; None where that was not said."""
        yield from ((f, False if self.held_out else None) for f in self.files)
        yield from ((f, True) for f in self.held_out)


class TextCorpus(Files):
    """A document for each file, named after it."""

    def documents(self, downloads: Path) -> Iterator[Document]:
        """The files' text as it stands. DataError where it is not UTF-8."""
        for file, held_out in self.sided():
            try:
                yield Document(file.name, file.path.read_bytes().decode(), held_out)
            except UnicodeDecodeError as error:
                raise _bad(file.path, f"not UTF-8 at byte {error.start}") from None


@dataclass(frozen=True)
class JsonlCorpus(Files):
    """A document for each line, named ``file:line``; blank lines are no documents."""

    field: str = "text"

    def identity(self) -> Any:
        """The files, and which field holds the text."""
        return [self.field, super().identity()]

    def documents(self, downloads: Path) -> Iterator[Document]:
        """The text of each line's field. DataError with file:line on a line without one."""
        for file, held_out in self.sided():
            with open(file.path, "rb") as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        text = self._text(line, f"{file.path}:{number}")
                        yield Document(f"{file.name}:{number}", text, held_out)

    def _text(self, line: bytes, where: str) -> str:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise _bad(where, f"not JSON in UTF-8: {error}") from None
        if not isinstance(value, dict):
            raise _bad(where, f"expected a JSON object, found {type(value).__name__}")
        text = value.get(self.field)
        if not isinstance(text, str):
            found = f"found {type(text).__name__}" if self.field in value else "there is none"
            raise _bad(where, f"expected text in the field {self.field!r}, {found}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _bad(where, f"the field {self.field!r} holds half of a surrogate pair") from None
        return text


class BinCorpus(Files):
    """nanoGPT's ``train.bin`` and ``val.bin``: token ids, split already, documents unknown."""

    def tokens(self, split: str, vocab_size: int) -> Iterator[np.ndarray]:
        """The ids of ``split`` (train or val) in pieces [T] (uint16).

        Raises DataError at the first id that is not below ``vocab_size``.
        """
        path = next(f.path for f in self.files if f.name == f"{split}.bin")
        with open(path, "rb") as stream:
            position = 0
            while content := stream.read(2 * _CHUNK_TOKENS):
                if len(content) % 2:
                    raise _bad(path, "an odd number of bytes; token ids take two each")
                tokens = np.frombuffer(content, dtype="<u2")
                beyond = np.flatnonzero(tokens >= vocab_size)
                if beyond.size:
                    first = int(beyond[0])
                    raise _bad(
                        path,
                        f"token {position + first} is {tokens[first]}, the tokenizer has "
                        f"{vocab_size}: was the file made by another tokenizer?",
                    )
                yield tokens
                position += tokens.size


def find(
    path: Path, data_format: str, field: str, val_path: Path | None = None
) -> TextCorpus | JsonlCorpus | BinCorpus:
    """The custom data set at ``path``; ``field`` is read by jsonl alone.

    What ``val_path`` holds is held out, and the rest is trained on. Raises DataError when there is
    no such file or folder, or nothing of that format in it.
    """
    files = _files(path, data_format)
    held_out = _files(val_path, data_format) if val_path else ()
    if data_format == "jsonl":
        return JsonlCorpus(files, held_out, field=field)
    return BinCorpus(files) if data_format == "bin" else TextCorpus(files, held_out)


def _files(path: Path, data_format: str) -> tuple[SourceFile, ...]:
    try:
        paths = _paths(path, data_format)
        return tuple(SourceFile(p, p.stat().st_size, sha256(p)) for p in paths)
    except OSError as error:
        raise _bad(error.filename or path, f"cannot read: {error.strerror}") from None


def _paths(path: Path, data_format: str) -> Sequence[Path]:
    if not path.exists():
        raise _bad(path, "no such file or folder")
    if data_format == "bin":
        paths = [path / "train.bin", path / "val.bin"]
        missing = [p.name for p in paths if not p.is_file()]
        if missing:
            raise _bad(path, f"no {' and no '.join(missing)} in it")
        return paths
    if path.is_file():
        return [path]
    paths = sorted(path.glob(f"*{_SUFFIX[data_format]}"))
    if not paths:
        raise _bad(path, f"no *{_SUFFIX[data_format]} in it")
    return paths


def _bad(where: Path | str, what: str) -> DataError:
    return DataError(Problem(what, str(where), "mend it, or set another path, and type: make data"))
