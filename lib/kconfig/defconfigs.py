"""The configurations that ship with the tree, and the fragments that go on top of them."""

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
    """A defconfig, or a fragment with the bases that its comment names ("*" is any)."""

    name: str
    # First comment line.
    summary: str
    path: Path
    bases: tuple[str, ...] = ()


def list_defconfigs(root: Path) -> tuple[list[Defconfig], list[Defconfig]]:
    """The defconfigs and the fragments of a tree, each sorted by name."""
    return _list(root / FOLDER), _list(root / FRAGMENTS)


def defconfig_layers(root: Path, spec: str, settings: str = "") -> list[Layer]:
    """The layers of ``NAME[+FRAGMENT…]``, and of ``SET`` on top.

    Raises ConfigError with every name that does not exist and the nearest ones that do.
    """
    names = spec.split("+")
    bases, fragments = (
        {found.name: found.path for found in listed} for listed in list_defconfigs(root)
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
    bases = [match.group(1).split() for match in map(_BASES.match, comments) if match]
    summaries = (c.lstrip("# ").strip() for c in comments if not _BASES.match(c))
    named = tuple(name for names in bases for name in names)
    return Defconfig(path.name, next(summaries, ""), path, named)


def _unknown(kind: str, name: str, known: dict[str, Path], others: dict[str, Path]) -> Problem:
    what = f"no {kind} is called {name!r}"
    near = difflib.get_close_matches(name, known, n=3)
    if name in others and kind == "defconfig":
        what += f"; it is a fragment: make defconfig-NAME+{name}"
    elif name in others:
        what += f"; it is a defconfig, and comes first: make defconfig-{name}"
    elif near:
        what += f"; nearest: {', '.join(near)}"
    return Problem(what, next="make list-defconfigs")
