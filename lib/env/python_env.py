"""Environment set-up. Standard library only, no torch.

It runs before any package is installed, as ``python3 -m lib.env.python_env`` from the root of the tree.
"""

import fcntl
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from lib.console import is_verbose, log
from lib.errors import ConfigError, Problem, RunError
from lib.project import ROOT

# Requirements of the tree: ranges from ``pyproject.toml``, pins from ``requirements.txt``.


# The files that determine the installed packages.
PYPROJECT = "pyproject.toml"
PINS = "requirements.txt"
CONSTRAINTS = "constraints.txt"

_SPECIFIER = re.compile(r"(?P<name>[A-Za-z0-9._-]+?)(?P<operator>>=|==)(?P<version>[0-9][0-9.]*)")


@dataclass(frozen=True)
class Requirement:
    """Package with its accepted versions and its tested version."""

    name: str
    # ">=" or "==", and the version to compare with.
    operator: str
    bound: str
    pin: str

    def accepts(self, version: str) -> bool:
        """Return whether an installed version is in the range."""
        if self.operator == "==":
            return release(version) == release(self.bound)
        return release(version) >= release(self.bound)

    def is_pin(self, version: str) -> bool:
        """Return whether ``version`` is the tested version; a build label (``+cpu``) is ignored."""
        return release(version) == release(self.pin)

    def __str__(self) -> str:
        return f"{self.name}=={self.pin}"


def default_requirements(root: Path) -> list[Requirement]:
    """Return the default requirements. Raises ConfigError for a package without a pin."""
    pins = dict(_split(line)[::2] for line in _lines(root / PINS))
    requirements = []
    for name, operator, bound in map(_split, _project(root)["dependencies"]):
        if name not in pins:
            advice = f"add {name}==<version>"
            raise ConfigError(Problem(f"{name}: no pin", PINS, advice, code="env.unpinned-package"))
        requirements.append(Requirement(name, operator, bound, pins[name]))
    return requirements


def extra_requirements(root: Path, names: Iterable[str]) -> list[Requirement]:
    """Return the pinned packages of the named extras. Raises ConfigError for an unknown extra."""
    extras = _project(root)["optional-dependencies"]
    unknown = sorted(set(names) - set(extras))
    if unknown:
        what = f"EXTRAS: unknown {', '.join(unknown)} (expected {', '.join(extras)})"
        raise ConfigError(Problem(what, code="env.unknown-extra"))
    packages = (_split(text) for name in names for text in extras[name])
    return [Requirement(name, operator, pin, pin) for name, operator, pin in packages]


def requirements_digest(root: Path) -> str:
    """Return one hex digest of the files that determine the packages, and of the tree's path."""
    total = hashlib.sha256(str(root).encode())
    for name in (PYPROJECT, PINS, CONSTRAINTS):
        total.update((root / name).read_bytes())
    return total.hexdigest()


def _project(root: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / PYPROJECT).read_text(encoding="utf-8"))[
        "project"
    ]
    return project


def _lines(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def _split(text: str) -> tuple[str, str, str]:
    match = _SPECIFIER.fullmatch(text)
    assert match, f"{text!r}: unsupported (expected name>=version or name==version)"
    return match["name"], match["operator"], match["version"]


def release(version: str) -> tuple[int, ...]:
    """Return ``2.13.0+cpu`` as (2, 13): without label, pre-release part and trailing zeros."""
    head = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(part) for part in head[0].split(".")] if head else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# Comparison of the running interpreter's packages with the requirements.


PROJECT = "kablate"


@dataclass(frozen=True)
class RequirementReport:
    """Missing and differing packages as (requirement, installed version); "" if not installed."""

    lacking: Sequence[tuple[Requirement, str]]
    # In range, but not the tested version.
    differing: Sequence[tuple[Requirement, str]]
    # Whether ``import lib`` from any folder imports this tree.
    installed: bool

    @property
    def complete(self) -> bool:
        """Return whether every requirement is met."""
        return self.installed and not self.lacking

    def describe_lacking(self) -> str:
        """Return the missing packages as text."""
        words = [
            f"{r.name} {r.operator} {r.bound} (has {version})" if version else r.name
            for r, version in self.lacking
        ]
        if not self.installed:
            words.append("this tree (editable install)")
        return ", ".join(words)

    def describe_differing(self) -> str:
        """Return the packages in range but not at the tested version as text, "" if none."""
        return ", ".join(f"{r.name} {version} (tested: {r.pin})" for r, version in self.differing)


def check_requirements(
    root: Path, requirements: Sequence[Requirement], path: Sequence[str]
) -> RequirementReport:
    """Compare the packages in the folders of ``path`` with ``requirements`` and ``root``."""
    lacking, differing = [], []
    for requirement in requirements:
        version = _version(requirement.name, path)
        if not requirement.accepts(version):
            lacking.append((requirement, version))
        elif not requirement.is_pin(version):
            differing.append((requirement, version))
    return RequirementReport(lacking, differing, _is_installed(root, path))


def import_path() -> list[str]:
    """Return the folders of installed packages: sys.path without the tree itself."""
    return [folder for folder in sys.path if Path(folder).resolve() != ROOT]


def install_command(root: Path, findings: RequirementReport) -> str:
    """Return the one command that installs the missing packages into the running interpreter."""
    packages = [str(requirement) for requirement, _ in findings.lacking]
    words = [*packages, "-e", str(root)]
    if find_spec("pip") is None and shutil.which("uv"):
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *words])
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def _version(name: str, path: Sequence[str]) -> str:
    return next((package.version for package in distributions(name=name, path=list(path))), "")


def _is_installed(root: Path, path: Sequence[str]) -> bool:
    """Return whether the installed package PROJECT is an editable install of ``root``."""
    for package in distributions(name=PROJECT, path=list(path)):
        origin = package.read_text("direct_url.json")
        if origin is None:
            return False
        folder = unquote(urlsplit(json.loads(origin)["url"]).path)
        return Path(folder).resolve() == root.resolve()
    return False


# The ``.venv`` managed by make: created, filled with pinned packages, marked when complete.


_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"

# pip's log line of a large download (10 MB or more).
_LARGE_DOWNLOAD = re.compile(r"\s*(Downloading .*\((?:[0-9.]+ GB|[0-9]{2,}\.[0-9] MB)\))")

# Messages of pip that are shown if it fails.
_SHOWN_MESSAGES = 40


@dataclass(frozen=True)
class SetupStamp:
    """Record of a finished set-up; an empty digest marks an unfinished one."""

    digest: str = ""
    # Folder and Python version; the environment's scripts contain the folder as an absolute path.
    place: str = ""
    extras: Sequence[str] = ()
    # Another environment, whose packages this one uses; "" if none.
    shared: str = ""


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

    def is_current(self, extras: Sequence[str], shared: str = "") -> bool:
        """Return whether a finished set-up matches requirements, location, ``extras`` and ``shared``.

        Without a ``shared`` environment, that of the set-up is used.
        """
        stamp = self._read()
        expected = SetupStamp(
            requirements_digest(self._root), self._place, stamp.extras, shared or stamp.shared
        )
        folders = [self.python, *([_site_packages(stamp.shared)] if stamp.shared else [])]
        return (
            stamp == expected
            and set(extras) <= set(stamp.extras)
            and all(path.exists() for path in folders)
        )

    def bring_up(self, extras: Sequence[str], shared: str = "") -> None:
        """Create or repair the environment, install the pinned packages and extras.

        Packages of the ``shared`` environment that meet the requirements are used from there; it is
        never changed. Extras and the shared environment of earlier set-ups are retained. A second
        process waits for the first and then returns. Raises ConfigError if virtual environments are
        unsupported or the shared one is missing, RunError if pip fails.
        """
        _check_base()
        shared = shared or self._read().shared
        if shared and (shared == str(self.path) or not _site_packages(shared).is_dir()):
            what = f"not another environment of {_VERSION} (expected {_site_packages(shared)})"
            advice = f"type: make setup VENV=DIR; without a shared one: rm -r {shlex.quote(str(self.path))}"
            raise ConfigError(Problem(what, "VENV", advice, code="env.no-shared"))
        self.path.mkdir(parents=True, exist_ok=True)
        with self._locked() as stream:
            if self.is_current(extras, shared):
                return
            started = time.monotonic()
            stamp = self._read()
            # An extra that has become a default dependency is no longer one.
            earlier = set(stamp.extras) & set(_project(self._root)["optional-dependencies"])
            all_extras = sorted({*earlier, *extras})
            packages = extra_requirements(self._root, all_extras)
            _write(stream, SetupStamp(extras=all_extras, shared=shared))
            is_other = (stamp.place, stamp.shared) != (self._place, shared)
            if not stamp.digest or is_other or not self.python.exists():
                self._create()
            if shared:
                # Python ignores .pth files in this folder, so the other tree is not imported.
                own = _site_packages(str(self.path)) / "shared.pth"
                own.write_text(f"{_site_packages(shared)}\n", encoding="utf-8")
            self._install(packages)
            self._verify(all_extras)
            digest = requirements_digest(self._root)
            _write(stream, SetupStamp(digest, self._place, all_extras, shared))
            log("SETUP", f"{self.path} is ready, in {time.monotonic() - started:.0f} s")

    def _read(self) -> SetupStamp:
        try:
            return SetupStamp(**json.loads(self._stamp.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return SetupStamp()

    @contextmanager
    def _locked(self) -> Iterator[IO[str]]:
        """Open the stamp file under an exclusive lock; the file is therefore never replaced."""
        with open(self._stamp, "a+", encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log("SETUP", "another make is setting up; waiting for it")
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield stream

    def _create(self) -> None:
        """Create an empty environment, removing the remains of an interrupted set-up."""
        base = _base_python()
        log("SETUP", f"creating {self.path} with {base} ({_VERSION})")
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != self._stamp:
                path.unlink()
        # -I: ignore PYTHONPATH and PYTHONHOME, which are set for the programs that run later.
        command = [base, "-I", "-m", "venv", str(self.path)]
        if subprocess.run(command, check=False).returncode:
            what = f"{shlex.join(command)} failed"
            raise RunError(Problem(what, next="type: make setup", code="env.install-failed"))

    def _install(self, packages: Sequence[Requirement]) -> None:
        """Install everything in one pip command, so that pip resolves all requirements together."""
        command = [str(self.python), "-I", "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["--no-input", "-r", PINS, "-c", CONSTRAINTS, "-e", "."]
        command += map(str, packages)
        log("SETUP", f"installing {PINS} with pip; torch alone is 0.2 to 3 GB, once")
        if _run_pip(command, self._root):
            what = f"pip failed, see its messages above: {shlex.join(command)}"
            raise RunError(Problem(what, next="type: make setup", code="env.install-failed"))

    def _verify(self, extras: Sequence[str]) -> None:
        """Raise RunError if the environment is incomplete although pip succeeded.

        -I removes the working directory from the path: only an editable install provides the
        module.
        """
        check = [str(self.python), "-I", "-m", "lib.env", "--active", str(self.python)]
        command = [*check, "--extras", " ".join(extras)]
        if subprocess.run(command, cwd=self._root, check=False).returncode:
            what = "pip succeeded, but the installation is incomplete or in another location"
            advice = f"{self.python} -m pip config list"
            raise RunError(Problem(what, next=advice, code="env.install-failed"))


def _site_packages(environment: str) -> Path:
    return Path(environment, "lib", _VERSION, "site-packages")


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
    """Run pip, log its large downloads (every line with ``V=1``), return its exit status.

    If it fails, its last messages are written to stderr.
    """
    messages: deque[str] = deque(maxlen=_SHOWN_MESSAGES)
    warnings = 0
    with subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            messages.append(line)
            warnings += line.startswith("WARNING: ")
            large = _LARGE_DOWNLOAD.match(line)
            if large or is_verbose():
                log("SETUP", large[1] if large else line.rstrip())
            elif line.startswith("Installing collected packages"):
                log("SETUP", f"packages to unpack: {line.count(',') + 1}")
    if is_verbose():
        return pip.returncode
    if pip.returncode:
        sys.stderr.writelines(messages)
    elif warnings:
        log("SETUP", f"warnings of pip: {warnings}; V=1 shows them")
    return pip.returncode


def _write(stream: IO[str], stamp: SetupStamp) -> None:
    """Rewrite the stamp in place, because the lock belongs to this file."""
    stream.truncate(0)
    stream.write(json.dumps(asdict(stamp)))
    stream.flush()
