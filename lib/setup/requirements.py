"""Requirements of the tree: ranges from ``pyproject.toml``, pins from ``requirements.txt``."""

import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem

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
            return _release(version) == _release(self.bound)
        return _release(version) >= _release(self.bound)

    def is_pin(self, version: str) -> bool:
        """Return whether ``version`` is the tested version; a build label (``+cpu``) is ignored."""
        return _release(version) == _release(self.pin)

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


def digest(root: Path) -> str:
    """Return one hex digest of the files that determine the packages, and of the tree's path."""
    total = hashlib.sha256(str(root).encode())
    for name in (PYPROJECT, PINS, CONSTRAINTS):
        total.update((root / name).read_bytes())
    return total.hexdigest()


def _project(root: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / PYPROJECT).read_text())["project"]
    return project


def _lines(path: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def _split(text: str) -> tuple[str, str, str]:
    match = _SPECIFIER.fullmatch(text)
    assert match, f"{text!r}: unsupported (expected name>=version or name==version)"
    return match["name"], match["operator"], match["version"]


def _release(version: str) -> tuple[int, ...]:
    """Return ``2.13.0+cpu`` as (2, 13): without label, pre-release part and trailing zeros."""
    head = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(part) for part in head[0].split(".")] if head else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
