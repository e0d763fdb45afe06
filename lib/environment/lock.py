"""Lock files: comparison of installed packages with locked versions."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from lib.environment.packages import normal
from lib.errors import ConfigError, Problem
from lib.setup.interpreter import PROJECT

_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;\\]+)")
# Installers and the project itself, which lock files omit.
_INSTALLERS = {"pip", "setuptools", "uv", "wheel", PROJECT}


def lock_differences(path: Path, packages: Mapping[str, str]) -> list[str]:
    """Return the installed ``packages`` (name → version) that differ from the lock file, as text.

    Locked packages that are not installed are ignored, because they may be for another platform. A
    build label (``+cpu``) is ignored too. Raises FileNotFoundError if the file is missing, and
    ConfigError if it names no package.
    """
    pins = _read(path)
    differences = []
    for name, version in packages.items():
        if name in _INSTALLERS:
            continue
        if name not in pins:
            differences.append(f"{name} {version} (not locked)")
        elif not {version, version.partition("+")[0]} & pins[name]:
            differences.append(f"{name} {version} (locked: {', '.join(sorted(pins[name]))})")
    return differences


def _read(path: Path) -> dict[str, set[str]]:
    """Return name → versions: a lock file for several platforms may list several versions."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(Problem("not a text file", str(path), code="lock-file.damaged")) from None
    pins: dict[str, set[str]] = {}
    for name, version in _toml(text, path) if path.suffix in (".lock", ".toml") else _lines(text):
        pins.setdefault(normal(name), set()).add(version)
    if not pins:
        what = "ENV_LOCK_FILE: no packages listed"
        raise ConfigError(Problem(what, str(path), code="lock-file.empty"))
    return pins


def _toml(text: str, path: Path) -> list[tuple[str, str]]:
    """Return the packages of uv.lock (table package) or pylock.toml (PEP 751, table packages)."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what = f"invalid TOML: {error}"
        raise ConfigError(Problem(what, str(path), code="lock-file.damaged")) from None
    packages = document.get("package", []) + document.get("packages", [])
    # The project has no version if it is installed from its folder.
    return [(str(item["name"]), str(item["version"])) for item in packages if "version" in item]


def _lines(text: str) -> list[tuple[str, str]]:
    matches = (_PIN.match(line.strip()) for line in text.splitlines())
    return [(match[1], match[2]) for match in matches if match]
