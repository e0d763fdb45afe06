"""Whitespace rules: no trailing whitespace, one final newline, tabs only in Kconfig and make."""

import re
from collections.abc import Iterator
from pathlib import Path

from lib.errors import Problem

_LEADING_BLANKS = re.compile(r"^(?: {8})+", re.MULTILINE)


def wants_tabs(path: Path) -> bool:
    """Return whether lines are indented with tabs: Kconfig files (as in Linux) and Makefiles."""
    return path.name.startswith(("Kconfig", "Makefile"))


def fixed(path: Path, text: str) -> str:
    """Return ``text`` with its whitespace corrected."""
    lines = [line.rstrip(" \t\r") for line in text.split("\n")]
    text = "\n".join(lines).rstrip("\n") + "\n" if text.strip() else ""
    if wants_tabs(path):
        return _LEADING_BLANKS.sub(lambda blanks: "\t" * (len(blanks[0]) // 8), text)
    return text.expandtabs(4) if path.suffix == ".py" else text


def check(path: Path, text: str) -> Iterator[Problem]:
    """Yield one problem for each line that ``fixed`` would change, and for the end of the file."""
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path}:{number}"
        if line != line.rstrip(" \t\r"):
            yield Problem("trailing whitespace", where, code="style.trailing-whitespace")
        if wants_tabs(path) and line.startswith(" " * 8):
            yield Problem("indented with spaces (expected tabs)", where, code="style.indentation")
        if path.suffix == ".py" and "\t" in line:
            yield Problem("tab character", where, code="style.tab")
    if text and text != text.rstrip("\n") + "\n":
        what = "missing final newline, or empty lines at the end"
        yield Problem(what, str(path), code="style.end-of-file")
