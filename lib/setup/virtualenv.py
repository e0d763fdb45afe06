"""The ``.venv`` managed by make: created, filled with pinned packages, marked when complete."""

import fcntl
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from lib.console import say, verbose
from lib.errors import ConfigError, Problem, RunError
from lib.setup.requirements import (
    CONSTRAINTS,
    PINS,
    Requirement,
    digest,
    extra_requirements,
)

_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"

# pip's log line of a large download (10 MB or more).
_LARGE_DOWNLOAD = re.compile(r"\s*(Downloading .*\((?:[0-9.]+ GB|[0-9]{2,}\.[0-9] MB)\))")


@dataclass(frozen=True)
class Stamp:
    """Record of a finished set-up; an empty digest marks an unfinished one."""

    digest: str = ""
    # Folder and Python version; the environment's scripts contain the folder as an absolute path.
    place: str = ""
    extras: Sequence[str] = ()


class VirtualEnvironment:
    """Virtual environment in the folder ``path`` for the tree ``root``."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self._root = root
        # The stamp marks a folder that make created, and may therefore change or remove.
        self._stamp = path / "kablate-setup.json"
        self._place = f"{path} {_VERSION}"

    def is_ours(self) -> bool:
        """Return whether make may create or change the folder (absent or made by make, no link)."""
        if self.path.is_symlink():
            return False
        return not self.path.exists() or self._stamp.exists()

    def is_current(self, extras: Sequence[str]) -> bool:
        """Return whether a finished set-up matches requirements, location and ``extras``."""
        stamp = self._read()
        return stamp == Stamp(digest(self._root), self._place, stamp.extras) and (
            set(extras) <= set(stamp.extras) and self.python.exists()
        )

    def bring_up(self, extras: Sequence[str]) -> None:
        """Create or repair the environment, install the pinned packages and extras.

        Extras of earlier set-ups are retained. A second process waits for the first and then
        returns. Raises ConfigError if virtual environments are unsupported, RunError if pip fails.
        """
        _check_base()
        self.path.mkdir(parents=True, exist_ok=True)
        with self._locked() as stream:
            if self.is_current(extras):
                return
            started = time.monotonic()
            stamp = self._read()
            all_extras = sorted({*stamp.extras, *extras})
            packages = extra_requirements(self._root, all_extras)
            _write(stream, Stamp(extras=all_extras))
            if not stamp.digest or stamp.place != self._place or not self.python.exists():
                self._create()
            self._install(packages)
            self._verify(all_extras)
            _write(stream, Stamp(digest(self._root), self._place, all_extras))
            say("SETUP", f"{self.path} is ready, in {time.monotonic() - started:.0f} s")

    def _read(self) -> Stamp:
        try:
            return Stamp(**json.loads(self._stamp.read_text()))
        except (OSError, ValueError, TypeError):
            return Stamp()

    @contextmanager
    def _locked(self) -> Iterator[IO[str]]:
        """Open the stamp file under an exclusive lock; the file is therefore never replaced."""
        with open(self._stamp, "a+") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("SETUP", "another make is setting up; waiting for it")
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield stream

    def _create(self) -> None:
        """Create an empty environment, removing the remains of an interrupted set-up."""
        base = _base_python()
        say("SETUP", f"creating {self.path} with {base} ({_VERSION})")
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != self._stamp:
                path.unlink()
        # -I: ignore PYTHONPATH and PYTHONHOME, which are set for the programs that run later.
        command = [base, "-I", "-m", "venv", str(self.path)]
        if subprocess.run(command, check=False).returncode:
            what = f"{shlex.join(command)} failed"
            raise RunError(Problem(what, next="make setup", code="env.install-failed"))

    def _install(self, packages: Sequence[Requirement]) -> None:
        """Install everything in one pip command, so that pip resolves all requirements together."""
        command = [str(self.python), "-I", "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--no-input", "-r", PINS, "-c", CONSTRAINTS, "-e", "."]
        command += map(str, packages)
        say("SETUP", f"installing {PINS} with pip; torch alone is 0.2 to 3 GB, once")
        if _run_pip(command, self._root):
            what = f"pip failed, see its messages above: {shlex.join(command)}"
            raise RunError(Problem(what, next="make setup", code="env.install-failed"))

    def _verify(self, extras: Sequence[str]) -> None:
        """Raise RunError if the environment is incomplete although pip succeeded.

        -I removes the working directory from the path: only an editable install provides the
        module.
        """
        check = [str(self.python), "-I", "-m", "lib.setup", "--active", str(self.python)]
        command = [*check, "--extras", " ".join(extras)]
        if subprocess.run(command, cwd=self._root, check=False).returncode:
            what = "pip succeeded, but the installation is incomplete or in another location"
            command = f"{self.python} -m pip config list"
            raise RunError(Problem(what, next=command, code="env.install-failed"))


def _check_base() -> None:
    """Raise ConfigError if the running interpreter cannot create a virtual environment."""
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        what = f"{sys.executable} cannot create a virtual environment: ensurepip is missing"
        command = "sudo apt-get install python3-venv"
        raise ConfigError(Problem(what, next=command, code="env.missing-package"))


def _base_python() -> str:
    """Return the interpreter to build from: the running one, or the base of its environment."""
    if sys.prefix == sys.base_prefix:
        return sys.executable
    return str(Path(sys.base_prefix, "bin", _VERSION))


def _run_pip(command: Sequence[str], root: Path) -> int:
    """Run pip, log its large downloads (every line with ``V=1``), return its exit status."""
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            large = _LARGE_DOWNLOAD.match(line)
            if large or verbose():
                say("SETUP", large[1] if large else line.rstrip())
            elif line.startswith("Installing collected packages"):
                say("SETUP", f"unpacking {line.count(',') + 1} packages")
    return pip.returncode


def _write(stream: IO[str], stamp: Stamp) -> None:
    """Rewrite the stamp in place, because the lock belongs to this file."""
    stream.truncate(0)
    stream.write(json.dumps(asdict(stamp)))
    stream.flush()
