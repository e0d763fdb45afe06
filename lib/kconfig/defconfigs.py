"""Configurations that ship with the tree (defconfigs) and fragments to combine with them."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from lib.errors import ConfigError, Problem
from lib.kconfig.layers import Layer
from lib.kconfig.parse import parse_set, read_file

FOLDER = "defconfigs"
FRAGMENTS = "defconfigs/fragments"
_BASES = re.compile(r"#\s*bases:(.*)")


@dataclass(frozen=True)
class Defconfig:
    """Defconfig or fragment. ``bases`` are the defconfigs a fragment supports ("*" for any)."""

    name: str
    # First comment line.
    summary: str
    path: Path
    bases: tuple[str, ...] = ()


def list_defconfigs(root: Path) -> tuple[list[Defconfig], list[Defconfig]]:
    """Return the defconfigs and the fragments of a tree, each sorted by name."""
    return _list(root / FOLDER), _list(root / FRAGMENTS)


def defconfig_layers(root: Path, spec: str, settings: str = "") -> list[Layer]:
    """Return the layers of ``NAME[+FRAGMENT…]``, followed by the layer of ``SET`` if any.

    Raises ConfigError with every unknown name and its nearest matches.
    """
    names = spec.split("+")
    bases, fragments = (
        {defconfig.name: defconfig.path for defconfig in listed} for listed in list_defconfigs(root)
    )
    missing = [] if names[0] in bases else [_unknown("defconfig", names[0], bases, fragments)]
    missing += [_unknown("fragment", n, fragments, bases) for n in names[1:] if n not in fragments]
    if missing:
        raise ConfigError(*missing)
    layers = [read_file(bases[names[0]], "defconfig", f"{FOLDER}/{names[0]}")]
    layers += [read_file(fragments[n], "fragment", f"{FRAGMENTS}/{n}") for n in names[1:]]
    return [*layers, parse_set(settings)] if settings else layers


def _list(folder: Path) -> list[Defconfig]:
    if not folder.is_dir():
        return []
    files = (path for path in folder.iterdir() if path.is_file() and path.name[0] != ".")
    return [_describe(path) for path in sorted(files)]


def _describe(path: Path) -> Defconfig:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    comments = [line for line in lines if line[:1] == "#" and not line.endswith(" is not set")]
    matches = [match.group(1).split() for match in map(_BASES.match, comments) if match]
    summaries = (c.lstrip("# ").strip() for c in comments if not _BASES.match(c))
    bases = tuple(name for names in matches for name in names)
    return Defconfig(path.name, next(summaries, ""), path, bases)


def _unknown(kind: str, name: str, names: dict[str, Path], others: dict[str, Path]) -> Problem:
    what = f"unknown {kind} {name!r}"
    near = difflib.get_close_matches(name, names, n=3)
    if name in others and kind == "defconfig":
        what += f"; {name} is a fragment: make defconfig-NAME+{name}"
    elif name in others:
        what += f"; {name} is a defconfig, put it first: make defconfig-{name}"
    elif near:
        what += f"; nearest: {', '.join(near)}"
    return Problem(what, next="make list-defconfigs", code=f"config.unknown-{kind}")
