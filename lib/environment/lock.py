"""Lock files: the versions that an environment was solved for."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from lib.environment.packages import normal
from lib.errors import ConfigError, Problem
from lib.setup.interpreter import PROJECT

_PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;\\]+)")
# Installers, which no solution names.
_INSTALLERS = {"pip", "setuptools", "uv", "wheel", PROJECT}


def lock_differences(path: Path, packages: Mapping[str, str]) -> list[str]:
    """How the installed ``packages`` (name → version) differ from the lock file, in words.

    A package of the lock file that is not installed is no difference: it may be for another
    platform. A build label (``+cpu``) is none either. FileNotFoundError where there is no such
    file, ConfigError where it names no package.
    """
    pins = _read(path)
    words = []
    for name, version in packages.items():
        if name in _INSTALLERS:
            continue
        if name not in pins:
            words.append(f"{name} {version} (not in it)")
        elif not {version, version.partition("+")[0]} & pins[name]:
            words.append(f"{name} {version} (in it: {', '.join(sorted(pins[name]))})")
    return words


def _read(path: Path) -> dict[str, set[str]]:
    """Name → versions: a lock file for several platforms may name several of one package."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(Problem("cannot be read: it is no text", str(path))) from None
    pins: dict[str, set[str]] = {}
    for name, version in _toml(text, path) if path.suffix in (".lock", ".toml") else _lines(text):
        pins.setdefault(normal(name), set()).add(version)
    if not pins:
        raise ConfigError(Problem("ENV_LOCK_FILE names no package", str(path)))
    return pins


def _toml(text: str, path: Path) -> list[tuple[str, str]]:
    """uv.lock has tables called package, pylock.toml (PEP 751) packages."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(Problem(f"cannot be read: {error}", str(path))) from None
    found = document.get("package", []) + document.get("packages", [])
    # The project itself has no version where it is installed from its folder.
    return [(str(item["name"]), str(item["version"])) for item in found if "version" in item]


def _lines(text: str) -> list[tuple[str, str]]:
    found = (_PIN.match(line.strip()) for line in text.splitlines())
    return [(match[1], match[2]) for match in found if match]
