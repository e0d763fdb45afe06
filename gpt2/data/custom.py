"""Custom data sets: text files, JSON lines, or token files that are already split."""

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
    """A source file: its path, size and digest."""

    path: Path
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """Return the file name; the folder is not part of the data set's identity."""
        return self.path.name


@dataclass(frozen=True)
class Files:
    """Base class of custom data sets: files with their digests, no packages."""

    files: tuple[SourceFile, ...]
    # Files of held-out documents; if empty, the hash of each text decides.
    held_out: tuple[SourceFile, ...] = ()
    packages: tuple[Package, ...] = ()

    def identity(self) -> Any:
        """Return the files' names and digests, training files first, then held-out files."""
        return [[[f.name, f.sha256] for f in side] for side in (self.files, self.held_out)]

    def provenance(self) -> list[dict[str, Any]]:
        """Return name, size and digest of each file, and its split if explicit."""
        return [
            {"file": f.name, "bytes": f.bytes, "sha256": f.sha256}
            | ({} if held_out is None else {"split": "val" if held_out else "train"})
            for f, held_out in self.sided()
        ]

    def text_bytes(self, downloads: Path) -> int:
        """Return the total size of the files."""
        return sum(f.bytes for f, _ in self.sided())

    def sided(self) -> Iterator[tuple[SourceFile, bool | None]]:
        """Yield each file and whether it is held out; None if the hash of each text decides."""
        yield from ((f, False if self.held_out else None) for f in self.files)
        yield from ((f, True) for f in self.held_out)


class TextCorpus(Files):
    """A corpus with one document per text file, named after the file."""

    def documents(self, downloads: Path) -> Iterator[Document]:
        """Yield the text of each file. Raises DataError if a file is not UTF-8."""
        for file, held_out in self.sided():
            try:
                yield Document(file.name, file.path.read_bytes().decode(), held_out)
            except UnicodeDecodeError as error:
                raise _bad(
                    file.path, f"not UTF-8 at byte {error.start}", "data.invalid-format"
                ) from None


@dataclass(frozen=True)
class JsonlCorpus(Files):
    """A corpus with one document per JSON line, named ``file:line``; blank lines are skipped."""

    field: str = "text"

    def identity(self) -> Any:
        """Return the files' identity and the name of the text field."""
        return [self.field, super().identity()]

    def documents(self, downloads: Path) -> Iterator[Document]:
        """Yield the text of each line. Raises DataError with file:line if a line is invalid."""
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
            raise _bad(where, f"not JSON in UTF-8: {error}", "data.invalid-format") from None
        if not isinstance(value, dict):
            what = f"invalid line (expected a JSON object, got {type(value).__name__})"
            raise _bad(where, what, "data.invalid-format")
        text = value.get(self.field)
        if not isinstance(text, str):
            actual = type(text).__name__ if self.field in value else "no such field"
            what = f"invalid field {self.field!r} (expected a string, got {actual})"
            raise _bad(where, what, "data.invalid-format")
        try:
            text.encode()
        except UnicodeEncodeError:
            what = f"invalid field {self.field!r}: unpaired surrogate"
            raise _bad(where, what, "data.invalid-format") from None
        return text


class BinCorpus(Files):
    """nanoGPT's ``train.bin`` and ``val.bin``: token ids, already split, without documents."""

    def tokens(self, split: str, vocab_size: int) -> Iterator[np.ndarray]:
        """Yield the ids of ``split`` (train or val) in chunks [T] (uint16).

        Raises DataError at the first id ≥ ``vocab_size``, or if the file has an odd size.
        """
        path = next(f.path for f in self.files if f.name == f"{split}.bin")
        with open(path, "rb") as stream:
            position = 0
            while content := stream.read(2 * _CHUNK_TOKENS):
                if len(content) % 2:
                    raise _bad(
                        path, "odd file size (token ids are two bytes)", "data.invalid-format"
                    )
                tokens = np.frombuffer(content, dtype="<u2")
                beyond = np.flatnonzero(tokens >= vocab_size)
                if beyond.size:
                    first = int(beyond[0])
                    raise _bad(
                        path,
                        f"token {position + first} is out of range (expected an id below "
                        f"{vocab_size}, got {tokens[first]}): wrong tokenizer?",
                        "data.tokenizer-mismatch",
                    )
                yield tokens
                position += tokens.size


def find(
    path: Path, data_format: str, field: str, val_path: Path | None = None
) -> TextCorpus | JsonlCorpus | BinCorpus:
    """Return the custom data set at ``path``; ``field`` is used by jsonl only.

    Documents in ``val_path`` are held out, all of ``path`` is then training data. Raises DataError
    if a path is missing or unreadable, or contains no file of the format.
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
        what = f"cannot read: {error.strerror}"
        raise _bad(error.filename or path, what, "data.unreadable") from None


def _paths(path: Path, data_format: str) -> Sequence[Path]:
    if not path.exists():
        raise _bad(path, "no such file or folder", "data.missing")
    if data_format == "bin":
        paths = [path / "train.bin", path / "val.bin"]
        missing = [p.name for p in paths if not p.is_file()]
        if missing:
            raise _bad(path, f"missing {' and '.join(missing)}", "data.missing")
        return paths
    if path.is_file():
        return [path]
    paths = sorted(path.glob(f"*{_SUFFIX[data_format]}"))
    if not paths:
        raise _bad(path, f"contains no *{_SUFFIX[data_format]} file", "data.missing")
    return paths


def _bad(where: Path | str, what: str, code: str) -> DataError:
    remedy = "fix the file, or set another path, and type: make data"
    return DataError(Problem(what, str(where), remedy, code=code))
