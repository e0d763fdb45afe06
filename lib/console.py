"""Terminal output: one line per event on stderr, with a fixed-width tag for grep."""

import os
import sys

TAG_WIDTH = 7
_COLOURS = {"FAIL": "31", "ERROR": "31", "REFUSE": "31", "WARN": "33", "DONE": "32"}


def colour_wanted() -> bool:
    """Return whether to colour stderr: a terminal, no ``NO_COLOR``, ``TERM=dumb`` or ``CI``."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("CI")
    return sys.stderr.isatty() and not plain and os.environ.get("TERM") != "dumb"


def ascii_only() -> bool:
    """Return whether the locale is limited to ASCII."""
    return "utf" not in (sys.stderr.encoding or "").lower()


def say(tag: str, text: str) -> None:
    """Write one event line ``TAG text`` to stderr in a single write."""
    head = f"{tag:<{TAG_WIDTH}}"
    if colour_wanted() and tag in _COLOURS:
        head = f"\x1b[{_COLOURS[tag]}m{head}\x1b[0m"
    line = f"{head} {text}\n"
    if ascii_only():
        line = line.encode("ascii", "replace").decode("ascii")
    sys.stderr.write(line)
    sys.stderr.flush()


def verbose() -> bool:
    """Return whether full commands and tracebacks are enabled (``V=1`` or ``V=2``)."""
    return os.environ.get("V", "0") not in ("", "0")
