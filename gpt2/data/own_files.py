"""Your own files: text and JSON lines, read by one decoder, and token files that are split already."""

import codecs
import hashlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.split import Document, is_held_out
from lib.errors import DataError, Problem
from lib.files import regular_file, sha256_file
from lib.units import first_of

_SUFFIX = {"text": ".txt", "jsonl": ".jsonl"}
# Bytes read at a time: 4M token ids.
_CHUNK_BYTES = 8 << 20
# Of fewer documents, a share of each is held out.
_FEW_DOCUMENTS = 10

# UTF-32 first: its signature begins with that of UTF-16.
_OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(content: bytes, where: Path | str) -> str:
    """Return the text of a file or of a line: ``normalized`` UTF-8.

    Raises DataError if it is in another encoding, damaged, or not text.
    """
    for signature, encoding in _OTHER_ENCODINGS.items():
        if content.startswith(signature):
            raise _not_utf8(where, f"{encoding} (expected UTF-8)", encoding)
    if content.count(0) * 10 > len(content):
        order = "BE" if content[::2].count(0) > content[1::2].count(0) else "LE"
        what = "zero bytes (expected UTF-8 text, got UTF-16 or a binary file)"
        raise _not_utf8(where, what, f"UTF-16{order}")
    try:
        return normalized(content.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(where, f"not UTF-8 at byte {error.start}", "latin1") from None


def normalized(text: str) -> str:
    """Return ``text`` without signatures (U+FEFF) in front, and with line feeds as line ends."""
    return text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _not_utf8(where: Path | str, what: str, encoding: str) -> DataError:
    path = shlex.quote(re.sub(r":\d+$", "", str(where)))
    command = f"iconv -f {encoding} -t UTF-8 -o converted {path}"
    advice = f"convert it, for example: {command}; then set the path of it, and type: make data"
    return _bad(where, what, remedy=advice)


@dataclass(frozen=True)
class SourceFile:
    """A file of yours; the folder of ``name`` is not part of the data set's identity."""

    path: Path
    name: str
    # False if you hold out other files; None if the split is made here.
    held_out: bool | None = None

    @cached_property
    def bytes_and_sha256(self) -> tuple[int, str]:
        try:
            return self.path.stat().st_size, sha256_file(self.path)
        except OSError as error:
            raise _unreadable(error, self.path) from None

    def chunks(self, lines: bool = False) -> Iterator[bytes]:
        """Yield the file by lines or chunks. Raises DataError if it changed since it was hashed."""
        digest = hashlib.sha256()
        try:
            with open(self.path, "rb", opener=regular_file) as stream:
                for chunk in stream if lines else iter(partial(stream.read, _CHUNK_BYTES), b""):
                    digest.update(chunk)
                    yield chunk
        except OSError as error:
            raise _unreadable(error, self.path) from None
        if digest.hexdigest() != self.bytes_and_sha256[1]:
            remedy = "wait until it is complete, and type: make data"
            raise _bad(self.path, "the file changed while it was read", "data.changed", remedy)


@dataclass(frozen=True)
class OwnFiles:
    """Files with names and digests, which are the identity of the data set."""

    # The training files, then the held-out files.
    files: tuple[SourceFile, ...]
    packages = ()

    def identity(self) -> Any:
        return [[f.held_out, f.name, f.bytes_and_sha256[1]] for f in self.files]

    def provenance(self) -> list[dict[str, Any]]:
        records = []
        for f in self.files:
            size, sha256 = f.bytes_and_sha256
            side = {} if f.held_out is None else {"split": "val" if f.held_out else "train"}
            records.append({"file": f.name, "bytes": size, "sha256": sha256, **side})
        return records

    def size_bytes(self) -> int:
        try:
            return sum(f.path.stat().st_size for f in self.files)
        except OSError as error:
            raise _unreadable(error, self.files[0].path) from None


@dataclass(frozen=True)
class OwnText(OwnFiles):
    """A document for each text file or JSON line."""

    # text or jsonl
    format: str
    # Of JSON lines.
    field: str
    # Files of the folders that are not read, such as "3 *.md"; "" if there are none.
    left_out: str

    @classmethod
    def at(cls, path: Path, val_path: Path | None, data_format: str, field: str) -> "OwnText":
        """Find the files; raise DataError if a path is missing or unreadable, or has none."""
        others: Counter[str] = Counter()
        files = _text_files(path, data_format, None if val_path is None else False, others)
        if val_path is not None:
            files += _text_files(val_path, data_format, True, others)
        return cls(tuple(files), data_format, field, _listed(others))

    def identity(self) -> Any:
        return [self.format, self.format == "jsonl" and self.field, *super().identity()]

    def unit(self, val_fraction: float) -> str:
        """Return the unit of the split: "paths", "document", or "piece" of too few documents."""
        if self.files[-1].held_out:
            return "paths"
        if self.format == "text" and len(self.files) < _FEW_DOCUMENTS:
            # Without reading a file that may be long.
            return "piece"
        sides = set()
        for number, document in enumerate(self.documents(), start=1):
            if document.text:
                sides.add(is_held_out(document.text, val_fraction))
            if number >= _FEW_DOCUMENTS and len(sides) == 2:
                return "document"
        return "piece"

    def documents(self, downloads: Path | None = None) -> Iterator[Document]:
        """Yield every document, named after its file, or ``file:line``; blank lines are skipped.

        Raises DataError if a file or a line is invalid.
        """
        for file in self.files:
            if self.format == "text":
                text = decode(b"".join(file.chunks()), file.path)
                yield Document(file.name, text, file.held_out)
                continue
            for number, line in enumerate(file.chunks(lines=True), start=1):
                if line.strip():
                    text = self._field_of(line, f"{file.path}:{number}")
                    yield Document(f"{file.name}:{number}", text, file.held_out)

    def _field_of(self, line: bytes, where: str) -> str:
        try:
            value = json.loads(decode(line, where))
        except ValueError as error:
            raise _bad(where, f"not JSON: {error}") from None
        if not isinstance(value, dict):
            actual = type(value).__name__
            raise _bad(where, f"invalid line (expected a JSON object, got {actual})")
        text = value.get(self.field)
        if isinstance(text, str):
            if not _SURROGATE.search(text):
                return normalized(text)
            actual = "an unpaired surrogate"
        else:
            actual = type(text).__name__ if self.field in value else "no such field"
        raise _bad(where, f"invalid field {self.field!r} (expected a string, got {actual})")


def _text_files(
    path: Path, data_format: str, held_out: bool | None, others: Counter[str]
) -> list[SourceFile]:
    """Return the files of a file or folder, folders below included; count the others by name.

    Hidden files and folders are not looked at.
    """
    if not path.exists():
        raise _bad(path, "no such file or folder", "data.missing")
    if not path.is_dir():
        return [SourceFile(path, path.name, held_out)]
    suffix = _SUFFIX[data_format]
    paths: list[Path] = []

    def refuse(error: OSError) -> None:
        raise _unreadable(error, path)

    for place, folders, files in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        others.update(f"linked folder {name}" for name in folders if Path(place, name).is_symlink())
        for name in files:
            if name.lower().endswith(suffix):
                paths.append(Path(place, name).relative_to(path))
            elif not name.startswith("."):
                others[f"*{Path(name).suffix}" if Path(name).suffix else name] += 1
    if not paths:
        what = f"contains no *{suffix} file (got {_listed(others) or 'none'})"
        remedy = f"rename the documents to *{suffix}, or set another path, and type: make data"
        raise _bad(path, what, "data.missing", remedy)
    paths.sort(key=lambda below: below.parts)
    for below in paths:
        if _SURROGATE.search(str(below)):
            raise _bad(path / below, "file name is not UTF-8", remedy="rename the file")
    return [SourceFile(path / below, below.as_posix(), held_out) for below in paths]


def _listed(others: Counter[str]) -> str:
    return first_of([f"{count} {name}" for name, count in others.most_common()], 5)


@dataclass(frozen=True)
class TokenFiles(OwnFiles):
    """nanoGPT's train.bin and val.bin: little-endian 16-bit ids."""

    @classmethod
    def at(cls, path: Path) -> "TokenFiles":
        """Find the two files. Raises DataError if one is missing, or has no plain 16-bit ids."""
        files = tuple(SourceFile(path / name, name) for name in ("train.bin", "val.bin"))
        if missing := [f.name for f in files if not f.path.is_file()]:
            raise _bad(path, f"missing {' and '.join(missing)}", "data.missing")
        vocabulary = path / "meta.pkl"
        if vocabulary.exists():
            what = "ids of the vocabulary in this file (expected ids of TOKENIZER)"
            remedy = (
                "train on the text: CUSTOM_FORMAT_TEXT=y, with its path, such as input.txt, as "
                "CUSTOM_PATH; or, if the ids are those of TOKENIZER, move this file away"
            )
            raise _bad(vocabulary, what, "data.tokenizer-mismatch", remedy)
        for file in files:
            _require_plain_ids(file.path, next(file.chunks(), b""))
        return cls(files)

    def unit(self, val_fraction: float) -> str:
        return "files"

    def tokens(self, split: str, vocab_size: int) -> Iterator[np.ndarray]:
        """Yield the ids of ``split`` (train or val) in chunks [T] (uint16).

        Raises DataError at the first id ≥ ``vocab_size``, or if the file has an odd size.
        """
        file = self.files[split == "val"]
        position = 0
        for content in file.chunks():
            if len(content) % 2:
                raise _bad(file.path, "odd file size (token ids are two bytes)")
            tokens = np.frombuffer(content, dtype="<u2")
            beyond = np.flatnonzero(tokens >= vocab_size)
            if beyond.size:
                first = int(beyond[0])
                what = (
                    f"token {position + first} is out of range (expected an id below {vocab_size}, "
                    f"got {tokens[first]}): wrong tokenizer?"
                )
                raise _bad(file.path, what, "data.tokenizer-mismatch")
            yield tokens
            position += tokens.size


# Files that begin with a header: NumPy's, and llm.c's (version 1 for GPT-2, and for Llama 3).
_HEADERS = {
    b"\x93NUMPY": "an array of NumPy",
    (20240520).to_bytes(4, "little"): "a token file of llm.c",
    (20240801).to_bytes(4, "little"): "a token file of llm.c",
}
# The upper parts of wide ids, of vocabularies below 2^18; fewer ids could be 16-bit ids by chance.
_MAX_UPPER, _MIN_IDS = 3, 8


def _require_plain_ids(path: Path, start: bytes) -> None:
    """Raise DataError if the file that begins with ``start`` has a header, or wider ids."""
    for magic, name in _HEADERS.items():
        if start.startswith(magic):
            what = f"{name} (expected 16-bit token ids without a header)"
            remedy = (
                "write the ids of each split by numpy.asarray(ids, '<u2').tofile(path); with a "
                "header of llm.c, for 16-bit ids, type: tail -c +1025 FILE > train.bin"
            )
            raise _bad(path, what, remedy=remedy)
    for size in (8, 4):
        ids = np.frombuffer(start[: len(start) // size * size], "<u2").reshape(-1, size // 2)
        for order, parts in (("<", ids), (">", ids[:, ::-1])):
            if len(parts) >= _MIN_IDS and parts[:, 1:].max() <= _MAX_UPPER < parts[:, 0].max():
                what = f"token ids of {8 * size} bits (expected 16 bits, little-endian)"
                converted = f"np.fromfile(path, '{order}u{size}').astype('<u2').tofile(new)"
                remedy = f"write each split with 16 bits in another folder, in Python: {converted}"
                raise _bad(path, what, remedy=remedy)


def token_documents(chunks: Iterator[np.ndarray], end_of_text: int) -> Iterator[np.ndarray]:
    """Yield the documents [T] of ``chunks``, which end with ``end_of_text``; empty ones are skipped."""
    rest: list[np.ndarray] = []
    for chunk in chunks:
        *complete, last = np.split(chunk, np.flatnonzero(chunk == end_of_text) + 1)
        for tokens in complete:
            document = np.concatenate([*rest, tokens[:-1]])
            rest.clear()
            if document.size:
                yield document
        rest.append(last)
    if rest and (document := np.concatenate(rest)).size:
        yield document


def _unreadable(error: OSError, path: Path) -> DataError:
    return _bad(error.filename or path, f"cannot read: {error.strerror}", "data.unreadable")


def _bad(
    where: Path | str,
    what: str,
    code: str = "data.invalid-format",
    remedy: str = "fix the file, or set another path, and type: make data",
) -> DataError:
    return DataError(Problem(what, str(where), remedy, code=code))
