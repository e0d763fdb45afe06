"""Sources of text: which one a configuration selects, and how your own files are read.

One decoder reads every file and every line: see ``decode``. Token files are read as they are, after
a look at their first bytes.
"""

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

from gpt2.data import hub
from gpt2.data.options import DataOptions
from gpt2.data.packages import PACKAGED, Document, PackagedCorpus, PinnedWheel
from lib.errors import DataError, Problem
from lib.files import regular_file

_INVALID = "data.invalid-format"
_SUFFIX = {"text": ".txt", "jsonl": ".jsonl"}
# Part of the identity of a data set: the names of the classes that first read each format.
_KIND = {"text": "TextCorpus", "jsonl": "JsonlCorpus", "bin": "BinCorpus"}
# Bytes read at a time: 4M token ids.
_CHUNK_BYTES = 8 << 20

# UTF-32 first: its signature begins with that of UTF-16.
_OTHER_ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_SIGNATURE = "\ufeff"
# A carriage return or a signature in a JSON string, as an escape after an even number of backslashes.
_JSON_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*\\(?:r|u000d|ufeff)", re.IGNORECASE)


def decode(content: bytes, where: Path | str) -> str:
    """Return the text of a file or of a line: ``normalized`` UTF-8.

    Raises DataError if it is in another encoding, damaged, or not text.
    """
    for signature, encoding in _OTHER_ENCODINGS.items():
        if content.startswith(signature):
            raise _not_utf8(where, f"{encoding} (expected UTF-8)", encoding)
    if content.count(0) * 10 > len(content):
        encoding = "UTF-16BE" if content[::2].count(0) > content[1::2].count(0) else "UTF-16LE"
        what = "zero bytes (expected UTF-8 text, got UTF-16 or a binary file)"
        raise _not_utf8(where, what, encoding)
    try:
        return normalized(content.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(where, f"not UTF-8 at byte {error.start}", "latin1") from None


def normalized(text: str) -> str:
    """Return ``text`` without signatures (U+FEFF) in front, and with line feeds as line ends."""
    return text.lstrip(_SIGNATURE).replace("\r\n", "\n").replace("\r", "\n")


def _not_utf8(where: Path | str, what: str, encoding: str) -> DataError:
    path = shlex.quote(re.sub(r":\d+$", "", str(where)))
    command = f"iconv -f {encoding} -t UTF-8 -o converted {path}"
    remedy = f"convert it, for example: {command}; then set the path of it, and type: make data"
    return _bad(where, what, _INVALID, remedy)


@dataclass(frozen=True)
class SourceFile:
    """A file of a custom data set; its folder is not part of the data set's identity."""

    path: Path
    # Relative to the folder of the data set.
    name: str
    format: str

    @cached_property
    def content(self) -> tuple[int, str, bool]:
        """Return size, SHA-256, and whether ``decode`` alters more than the encoding."""
        size, digest, altered = 0, hashlib.sha256(), False
        for piece in self._read():
            altered = altered or self._is_altered(piece, first=size == 0)
            size += len(piece)
            digest.update(piece)
        return size, digest.hexdigest(), altered

    def pieces(self) -> Iterator[bytes]:
        """Yield the file: lines of JSON, or chunks. Raises DataError if it changed since ``content``."""
        digest = hashlib.sha256()
        for piece in self._read():
            digest.update(piece)
            yield piece
        if digest.hexdigest() != self.content[1]:
            what = "the file changed while it was read"
            advice = "wait until it is complete, and type: make data"
            raise _bad(self.path, what, "data.changed", advice)

    def _read(self) -> Iterator[bytes]:
        try:
            with open(self.path, "rb", opener=regular_file) as stream:
                if self.format == "jsonl":
                    yield from stream
                else:
                    yield from iter(partial(stream.read, _CHUNK_BYTES), b"")
        except OSError as error:
            raise _unreadable(error, self.path) from None

    def _is_altered(self, piece: bytes, first: bool) -> bool:
        if self.format == "jsonl":
            line = piece.removeprefix(codecs.BOM_UTF8)
            return codecs.BOM_UTF8 in line or bool(b"\\" in line and _JSON_ESCAPE.search(line))
        signed = first and piece.startswith(codecs.BOM_UTF8)
        return self.format == "text" and (signed or b"\r" in piece)


@dataclass(frozen=True)
class CustomCorpus:
    """Your own files: a document for each text file or JSON line, or token files that are split."""

    format: str
    files: tuple[SourceFile, ...]
    # Files of held-out documents; if empty, the split is made here.
    held_out: tuple[SourceFile, ...] = ()
    # Of JSON lines.
    field: str = ""
    # Files of the folder that are not read, such as "3 *.md"; "" if there are none.
    left_out: str = ""
    packages: tuple[PinnedWheel, ...] = ()

    def identity(self) -> Any:
        """Return names and digests, training files first, then held-out files, and the text field."""
        sides = [[[f.name, f.content[1]] for f in side] for side in (self.files, self.held_out)]
        return [self.field, sides] if self.format == "jsonl" else sides

    def provenance(self) -> list[dict[str, Any]]:
        """Return name, size and digest of each file, and its split if explicit."""
        return [
            {"file": f.name, "bytes": f.content[0], "sha256": f.content[1]}
            | ({} if held_out is None else {"split": "val" if held_out else "train"})
            for f, held_out in self.sided()
        ]

    @property
    def explicit_split(self) -> bool:
        return bool(self.held_out) or self.format == "bin"

    @property
    def is_altered(self) -> bool:
        """Return whether the decoder alters a file."""
        return any(f.content[2] for f, _ in self.sided())

    def size_bytes(self) -> int:
        """Return the size of the files, without reading them."""
        try:
            return sum(f.path.stat().st_size for f, _ in self.sided())
        except OSError as error:
            raise _unreadable(error, self.files[0].path) from None

    def sided(self) -> Iterator[tuple[SourceFile, bool | None]]:
        """Yield each file and whether it is held out; None if the split is made here."""
        yield from ((f, False if self.held_out else None) for f in self.files)
        yield from ((f, True) for f in self.held_out)

    def documents(self, downloads: Path | None = None) -> Iterator[Document]:
        """Yield every document, named after its file, or ``file:line``; blank lines are skipped.

        Raises DataError if a file or a line is invalid.
        """
        for file, held_out in self.sided():
            if self.format == "text":
                yield Document(file.name, decode(b"".join(file.pieces()), file.path), held_out)
                continue
            for number, line in enumerate(file.pieces(), start=1):
                if line.strip():
                    text = self._field_of(line, f"{file.path}:{number}")
                    yield Document(f"{file.name}:{number}", text, held_out)

    def _field_of(self, line: bytes, where: str) -> str:
        try:
            value = json.loads(decode(line, where))
        except ValueError as error:
            raise _bad(where, f"not JSON: {error}", _INVALID) from None
        if not isinstance(value, dict):
            what = f"invalid line (expected a JSON object, got {type(value).__name__})"
            raise _bad(where, what, _INVALID)
        text = value.get(self.field)
        if not isinstance(text, str):
            actual = type(text).__name__ if self.field in value else "no such field"
            what = f"invalid field {self.field!r} (expected a string, got {actual})"
            raise _bad(where, what, _INVALID)
        if _SURROGATE.search(text):
            what = f"invalid field {self.field!r}: unpaired surrogate"
            raise _bad(where, what, _INVALID)
        return normalized(text)

    def tokens(self, split: str, vocab_size: int) -> Iterator[np.ndarray]:
        """Yield the ids of ``split`` (train or val) of token files in chunks [T] (uint16).

        Raises DataError at the first id ≥ ``vocab_size``, or if the file has an odd size.
        """
        file = next(f for f in self.files if f.name == f"{split}.bin")
        position = 0
        for content in file.pieces():
            if len(content) % 2:
                raise _bad(file.path, "odd file size (token ids are two bytes)", _INVALID)
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


# What determines the documents of a data set, and yields them.
Corpus = PackagedCorpus | CustomCorpus | hub.HubCorpus


def select_corpus(config: DataOptions, build_dir: Path) -> Corpus:
    """Return the source of ``config`` without reading its texts or querying the hub.

    Raises DataError if local files of the source are missing or invalid.
    """
    if config.dataset in PACKAGED:
        return PACKAGED[config.dataset]
    if config.dataset != "custom":
        return hub.find_hub_corpus(config, build_dir)
    if not config.custom_path:
        what = "CUSTOM_PATH: required for a custom data set, but empty"
        raise DataError(Problem(what, next="type: make menuconfig", code="config.missing-value"))
    return custom_corpus(
        build_dir / config.custom_path,
        config.custom_format,
        config.custom_text_field,
        build_dir / config.custom_val_path if config.custom_val_path else None,
    )


def kind_of(corpus: Corpus) -> str:
    """Return the name that is hashed: another one would prepare the same data again."""
    return _KIND[corpus.format] if isinstance(corpus, CustomCorpus) else type(corpus).__name__


def custom_corpus(
    path: Path, data_format: str, field: str = "", val_path: Path | None = None
) -> CustomCorpus:
    """Return the custom data set at ``path``, with the documents of ``val_path`` held out.

    Raises DataError if a path is missing or unreadable, or has no file of the format.
    """
    try:
        if data_format == "bin":
            return CustomCorpus(data_format, _token_files(path))
        files, left_out = _text_files(path, data_format)
        if val_path is None:
            return CustomCorpus(data_format, files, (), field, left_out)
        held_out, also = _text_files(val_path, data_format)
        left_out = ", ".join(filter(None, [left_out, also]))
        return CustomCorpus(data_format, files, held_out, field, left_out)
    except OSError as error:
        raise _unreadable(error, path) from None


def _text_files(path: Path, data_format: str) -> tuple[tuple[SourceFile, ...], str]:
    """Return the files of a file or folder, folders below included, and the names of the others.

    Hidden files and folders are not looked at.
    """
    if not path.exists():
        raise _bad(path, "no such file or folder", "data.missing")
    if not path.is_dir():
        return (SourceFile(path, path.name, data_format),), ""
    suffix, names, others = _SUFFIX[data_format], [], Counter[str]()
    for place, folders, files in os.walk(path, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = Path(place).relative_to(path)
        others.update(f"linked folder {name}" for name in folders if Path(place, name).is_symlink())
        for name in files:
            if name.lower().endswith(suffix):
                names.append(below / name)
            elif not name.startswith("."):
                others[f"*{Path(name).suffix}" if Path(name).suffix else name] += 1
    shown = ", ".join(f"{count} {name}" for name, count in others.most_common(5))
    if len(others) > 5:
        shown += f" and {sum(others.values()) - sum(n for _, n in others.most_common(5))} more"
    if not names:
        what = f"contains no *{suffix} file (got {shown or 'none'})"
        remedy = f"rename the documents to *{suffix}, or set another path, and type: make data"
        raise _bad(path, what, "data.missing", remedy)
    ordered = sorted(names, key=lambda name: name.parts)
    for below in ordered:
        if _SURROGATE.search(str(below)):
            raise _bad(path / below, "file name is not UTF-8", _INVALID, "rename the file")
    return tuple(SourceFile(path / n, n.as_posix(), data_format) for n in ordered), shown


def _token_files(path: Path) -> tuple[SourceFile, ...]:
    files = tuple(SourceFile(path / name, name, "bin") for name in ("train.bin", "val.bin"))
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
        with open(file.path, "rb", opener=regular_file) as stream:
            _require_plain_ids(file.path, stream.read(_CHUNK_BYTES))
    return files


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
            raise _bad(path, what, _INVALID, remedy)
    for size in (8, 4):
        ids = np.frombuffer(start[: len(start) // size * size], "<u2").reshape(-1, size // 2)
        for order, parts in (("<", ids), (">", ids[:, ::-1])):
            wide = len(parts) >= _MIN_IDS and parts[:, 1:].max() <= _MAX_UPPER < parts[:, 0].max()
            if wide:
                what = f"token ids of {8 * size} bits (expected 16 bits, little-endian)"
                remedy = _conversion(path.parent, f"{order}u{size}")
                raise _bad(path, what, _INVALID, remedy)


def _conversion(folder: Path, dtype: str) -> str:
    new = f"{folder}-16bit"
    program = (
        "import numpy as np\n"
        "for name in ('train.bin', 'val.bin'):\n"
        f"    ids = np.fromfile({str(folder)!r} + '/' + name, {dtype!r})\n"
        "    assert ids.max() < 65536\n"
        f"    ids.astype('<u2').tofile({new!r} + '/' + name)"
    )
    command = f"mkdir {shlex.quote(new)} && python3 -c {shlex.quote(program)}"
    return f"set CUSTOM_PATH to a converted copy, for example: {command}"


def _raise(error: OSError) -> None:
    raise error


def _unreadable(error: OSError, path: Path) -> DataError:
    return _bad(error.filename or path, f"cannot read: {error.strerror}", "data.unreadable")


def _bad(
    where: Path | str,
    what: str,
    code: str,
    remedy: str = "fix the file, or set another path, and type: make data",
) -> DataError:
    return DataError(Problem(what, str(where), remedy, code=code))
