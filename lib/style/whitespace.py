"""Blanks: none at the end of a line, one line end at the end of a file, tabs only where they mean."""

import re
from collections.abc import Iterator
from pathlib import Path

from lib.errors import Problem

_LEADING_BLANKS = re.compile(r"^(?: {8})+", re.MULTILINE)


def wants_tabs(path: Path) -> bool:
    """Whether lines are indented by tabs: Kconfig files, as in Linux, and make's."""
    return path.name.startswith(("Kconfig", "Makefile"))


def fixed(path: Path, text: str) -> str:
    """``text`` as it should be."""
    lines = [line.rstrip(" \t\r") for line in text.split("\n")]
    text = "\n".join(lines).rstrip("\n") + "\n" if text.strip() else ""
    if wants_tabs(path):
        return _LEADING_BLANKS.sub(lambda blanks: "\t" * (len(blanks[0]) // 8), text)
    return text.expandtabs(4) if path.suffix == ".py" else text


def check(path: Path, text: str) -> Iterator[Problem]:
    """One problem for each line that ``fixed`` would change, and for the end of the file."""
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if line != line.rstrip(" \t\r"):
            yield Problem("blanks at the end of the line", where)
        if wants_tabs(path) and line.startswith(" " * 8):
            yield Problem("indented by blanks, not by tabs", where)
        if path.suffix == ".py" and "\t" in line:
            yield Problem("a tab", where)
    if text and text != text.rstrip("\n") + "\n":
        yield Problem("ends without a line end, or with empty lines", str(path))
