"""The ``.venv`` that make looks after: created, filled with the pinned set, marked when complete."""

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

# What pip says of a download that takes a while.
_LARGE_DOWNLOAD = re.compile(r"\s*(Downloading .*\((?:[0-9.]+ GB|[0-9]{2,}\.[0-9] MB)\))")


@dataclass(frozen=True)
class Stamp:
    """The record of a finished set-up; without a digest, of one that was begun."""

    digest: str = ""
    # The environment's folder and Python version: its programs name the folder they were made for.
    place: str = ""
    extras: Sequence[str] = ()


class VirtualEnvironment:
    """The folder ``path``, filled for the tree ``root``."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self._root = root
        # Its presence says that make created the folder and may change or remove it.
        self._stamp = path / "kablate-setup.json"
        self._place = f"{path} {_VERSION}"

    def is_ours(self) -> bool:
        """Whether make may create or change it: absent, or made by make, and no link."""
        if self.path.is_symlink():
            return False
        return not self.path.exists() or self._stamp.exists()

    def is_current(self, extras: Sequence[str]) -> bool:
        """Whether a finished set-up was for these requirements, this place and these extras."""
        stamp = self._read()
        return stamp == Stamp(digest(self._root), self._place, stamp.extras) and (
            set(extras) <= set(stamp.extras) and self.python.exists()
        )

    def bring_up(self, extras: Sequence[str]) -> None:
        """Create or repair it, install the pinned set and the extras, and mark it complete.

        Extras of earlier set-ups stay. ConfigError where no virtual environment can be made,
        RunError where pip fails. A second process waits for the first and finds the work done.
        """
        _check_base()
        self.path.mkdir(parents=True, exist_ok=True)
        with self._locked() as stream:
            if self.is_current(extras):
                return
            started = time.monotonic()
            stamp = self._read()
            wanted = sorted({*stamp.extras, *extras})
            packages = extra_requirements(self._root, wanted)
            _write(stream, Stamp(extras=wanted))
            if not stamp.digest or stamp.place != self._place or not self.python.exists():
                self._create()
            self._install(packages)
            self._verify(wanted)
            _write(stream, Stamp(digest(self._root), self._place, wanted))
            say("SETUP", f"{self.path} is ready, in {time.monotonic() - started:.0f} s")

    def _read(self) -> Stamp:
        try:
            return Stamp(**json.loads(self._stamp.read_text()))
        except (OSError, ValueError, TypeError):
            return Stamp()

    @contextmanager
    def _locked(self) -> Iterator[IO[str]]:
        """The open stamp file, held by one process at a time and so never replaced."""
        with open(self._stamp, "a+") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("SETUP", "another make is setting up; waiting for it")
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield stream

    def _create(self) -> None:
        """An empty environment in place of whatever an interrupted set-up left."""
        base = _base_python()
        say("SETUP", f"creating {self.path} with {base} ({_VERSION})")
        for left_over in self.path.iterdir():
            if left_over.is_dir() and not left_over.is_symlink():
                shutil.rmtree(left_over)
            elif left_over != self._stamp:
                left_over.unlink()
        # -I: PYTHONPATH and PYTHONHOME are for the programs that run later, not for this.
        command = [base, "-I", "-m", "venv", str(self.path)]
        if subprocess.run(command, check=False).returncode:
            raise RunError(Problem(f"{shlex.join(command)} failed", next="make setup"))

    def _install(self, packages: Sequence[Requirement]) -> None:
        """One pip command for everything, so that one resolution holds for all."""
        command = [str(self.python), "-I", "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--no-input", "-r", PINS, "-c", CONSTRAINTS, "-e", "."]
        command += map(str, packages)
        say("SETUP", f"installing {PINS} with pip; torch alone is 0.2 to 3 GB, once")
        if _run_pip(command, self._root):
            problem = f"pip failed; its messages are above. It was: {shlex.join(command)}"
            raise RunError(Problem(problem, next="make setup"))

    def _verify(self, extras: Sequence[str]) -> None:
        """RunError where the environment lacks something although pip was content.

        -I keeps the current folder out of the path: only an editable install finds the module.
        """
        check = [str(self.python), "-I", "-m", "lib.setup", "--active", str(self.python)]
        command = [*check, "--extras", " ".join(extras)]
        if subprocess.run(command, cwd=self._root, check=False).returncode:
            problem = "pip reported success, but installed elsewhere or in part"
            raise RunError(Problem(problem, next=f"{self.python} -m pip config list"))


def _check_base() -> None:
    """ConfigError where the running interpreter cannot make a virtual environment."""
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        problem = f"{sys.executable} cannot make a virtual environment: it has no ensurepip"
        raise ConfigError(Problem(problem, next="sudo apt-get install python3-venv"))


def _base_python() -> str:
    """The interpreter to build from: the running one, or the one its environment was built from."""
    if sys.prefix == sys.base_prefix:
        return sys.executable
    return str(Path(sys.base_prefix, "bin", _VERSION))


def _run_pip(command: Sequence[str], root: Path) -> int:
    """Run pip, show its large downloads (with ``V=1`` every line), return its exit status."""
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
    """Replace the stamp in place: the lock belongs to this file."""
    stream.truncate(0)
    stream.write(json.dumps(asdict(stamp)))
    stream.flush()
