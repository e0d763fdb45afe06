"""Names that an earlier version had: the table "Removed" of docs/former-system.md.

Standard library only, because make answers before any package is installed.
"""

import re
from fnmatch import fnmatchcase
from functools import cache

from lib.project import ROOT

# ``off`` of a symbol whose value never changed the result of a run.
ANY_VALUE = "any"
_TABLE = ROOT / "docs" / "former-system.md"


@cache
def removed_names() -> dict[tuple[str, str], tuple[str, str]]:
    """Return what to type for each kind and name, after the value of a symbol without effect.

    That is the text with which a recorded configuration equals one without the symbol; "" if none. A
    cell of the table may list several names and patterns.
    """
    _, _, section = _TABLE.read_text(encoding="utf-8").partition("\n## Removed\n")
    table = section.partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("|")][2:]
    removed = {}
    for row in rows:
        kind, names, off, use = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
        for name in names.replace("`", "").split(", "):
            removed[kind, name] = off.strip("`"), use
    return removed


def removed_symbols() -> dict[str, str | None]:
    """Return symbol → the value at which recorded configurations may drop it.

    The value is the text of a configuration file, ``ANY_VALUE`` for every value, or None for none.
    """
    rows = removed_names().items()
    return {name: off or None for (kind, name), (off, _) in rows if kind == "symbol"}


def is_without_effect(symbol: str, value: str) -> bool:
    """Return whether ``symbol`` is gone, and ``value`` (text) is what runs do without it."""
    off = removed_symbols().get(symbol)
    return off in (ANY_VALUE, '""' if value == "" else value)


def gone(kind: str, name: str) -> str:
    """Return ``is gone: use …`` for a name of the table, or the first pattern that matches; else "".

    The option of a variable has the variable's row, and a variable that was a symbol the symbol's.
    """
    rows = removed_names()
    patterns = (key for key in rows if key[0] == kind and "*" in key[1])
    matching = (rows[key] for key in patterns if fnmatchcase(name, key[1]))
    row = rows.get((kind, name)) or next(matching, None)
    if row is None and kind == "option":
        return gone("variable", name.strip("-").replace("-", "_").upper())
    # Not by a pattern: a symbol of today may match it.
    if row is None and kind == "variable":
        row = rows.get(("symbol", name))
    if row is None:
        return ""
    use = row[1].replace("`", "").replace("\\|", "|")
    return "is gone" + f": use {use}" * bool(use) + " (docs/former-system.md)"
