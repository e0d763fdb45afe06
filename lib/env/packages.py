"""The running interpreter's environment and packages, from its folder: variables stay set outside of it."""

import hashlib
import importlib.metadata
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem
from lib.project import ROOT

PROJECT = "kablate"


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and the environment of its packages."""

    # conda, uv, venv or system.
    kind: str
    # Last component of the path; "base" for the installation folder of conda.
    name: str
    # Full version, such as 3.13.1.
    python: str
    prefix: Path
    program: str = sys.executable

    def __str__(self) -> str:
        return f"{self.kind} {self.name}, Python {self.python}"


def current_interpreter(
    prefix: Path = Path(sys.prefix),
    base_prefix: Path = Path(sys.base_prefix),
    program: str = sys.executable,
) -> Interpreter:
    """Return the interpreter of the environment ``prefix``, made from that in ``base_prefix``.

    uv records its version in pyvenv.cfg, and conda creates a folder conda-meta. A virtual environment
    created from conda's Python counts as a virtual environment.
    """
    marker = prefix / "pyvenv.cfg"
    if prefix != base_prefix and marker.is_file():
        text = marker.read_text(encoding="utf-8")
        kind = "uv" if re.search(r"(?im)^\s*uv\s*=", text) else "venv"
    else:
        kind = "conda" if (prefix / "conda-meta").is_dir() else "system"
    # Only the installation folder of conda contains condabin.
    is_base = kind == "conda" and (prefix / "condabin").is_dir()
    name = "base" if is_base else prefix.name
    return Interpreter(kind, name, platform.python_version(), prefix, program)


# Folder NAME-VERSION.dist-info, or NAME-VERSION-pyX.Y.egg-info of old setuptools.
_INFO = re.compile(r"(?P<name>[^-]+(?:-[^0-9][^-]*)*)-(?P<version>[^-]+)(?:-py[\d.]+)?")


def installed_packages(path: Sequence[str] | None = None) -> dict[str, str]:
    """Return name → version of the packages in ``path``, by folders: ten times faster than metadata."""
    packages: dict[str, str] = {}
    for entry in filter(None, sys.path if path is None else path):
        for kind in ("dist-info", "egg-info"):
            for folder in Path(entry).glob(f"*.{kind}"):
                if match := _INFO.fullmatch(folder.stem):
                    packages.setdefault(normalize_name(match["name"]), match["version"])
    return dict(sorted(packages.items()))


def normalize_name(name: str) -> str:
    # PEP 503.
    return re.sub(r"[-_.]+", "-", name).lower()


def format_packages(packages: Mapping[str, str]) -> str:
    """Return one line ``name==version`` per package, sorted by name (packages.txt)."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))


def packages_digest(packages: Mapping[str, str]) -> str:
    return hashlib.sha256(format_packages(packages).encode()).hexdigest()


def missing_packages(extras: Sequence[str] = ()) -> list[str]:
    """Return the requirements, those of ``extras`` included, that this interpreter does not meet."""
    try:
        # Of the required packages itself.
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging, and perhaps others"]
    project = _project()
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(text for name in extras for text in optional[name])]
    missing = []
    for requirement in map(Requirement, wanted):
        found = [each.version for each in importlib.metadata.distributions(name=requirement.name)]
        if not found:
            missing.append(str(requirement))
        elif not requirement.specifier.contains(found[0], prereleases=True):
            missing.append(f"{requirement} (has {found[0]})")
    return missing


def known_extras() -> list[str]:
    return list(_project()["optional-dependencies"])


def install_command(python: str, extras: Sequence[str] = ()) -> list[str]:
    """Return the command that installs the pinned packages, ``extras`` and this tree for ``python``."""
    tree = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    pins = ["-r", str(ROOT / "requirements.txt"), "-c", str(ROOT / "constraints.txt")]
    words = [*pins, "-e", tree]
    if find_spec("pip") is None and shutil.which("uv"):
        return ["uv", "pip", "install", "--python", python, *words]
    return [python, "-m", "pip", "install", *words]


def _project() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


# Installers and the project itself, which lock files omit.
_INSTALLERS = {"pip", "setuptools", "uv", "wheel", PROJECT}


def lock_differences(path: Path, packages: Mapping[str, str]) -> list[str]:
    """Return the installed ``packages`` (name → version) that differ from the lock file, as text.

    Packages of the lock file that are not installed, perhaps for another platform, and build labels
    (``+cpu``) are ignored. Raises FileNotFoundError, or ConfigError if it cannot be read or is empty.
    """
    # A lock file for several platforms may list several versions.
    pins: dict[str, set[str]] = {}
    for name, version in _locked(path):
        pins.setdefault(normalize_name(name), set()).add(version)
    if not pins:
        what = "ENV_LOCK_FILE: no packages listed"
        raise ConfigError(Problem(what, str(path), code="lock-file.empty"))
    differences = []
    for name, version in packages.items():
        if name in _INSTALLERS:
            continue
        if name not in pins:
            differences.append(f"{name} {version} (not locked)")
        elif not {version, version.partition("+")[0]} & pins[name]:
            differences.append(f"{name} {version} (locked: {', '.join(sorted(pins[name]))})")
    return differences


def _locked(path: Path) -> list[tuple[str, str]]:
    """Return names and versions of uv.lock (table package), pylock.toml (PEP 751, table packages), or
    a list of NAME==VERSION.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix not in (".lock", ".toml"):
            return re.findall(r"(?m)^\s*([A-Za-z0-9._-]+)==([^\s;\\]+)", text)
        document = tomllib.loads(text)
    except ValueError as error:
        what = f"not a lock file: {error}"
        raise ConfigError(Problem(what, str(path), code="lock-file.damaged")) from None
    items = document.get("package", []) + document.get("packages", [])
    # The project has no version if it is installed from its folder.
    return [(str(item["name"]), str(item["version"])) for item in items if "version" in item]
