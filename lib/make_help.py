"""``make help``: the ``##`` texts of the Makefile by group. Standard library only.

    python3 -m lib.make_help MAKEFILE [SUMMARY]

``target: ... ## text`` describes a target, ``##: label text`` any other entry, and ``##@ Group``
begins a group. SUMMARY describes the configured runs; without SUMMARY, the help explains how to
create a configuration.
"""

import re
import sys
from collections.abc import Iterable

_GROUP = re.compile(r"##@ (?P<title>.+)")
_ENTRY = re.compile(r"(?:##: (?P<label>\S.*?)  |(?P<target>[a-z][a-z-]*):.*?## )(?P<text>.+)")
# One column wider than the longest label, defconfig-NAME[+FRAG].
_COLUMN = 22
_NO_CONFIG = "No .config yet: make uses gpt2-quickstart; make list-defconfigs lists others"


def help_text(makefile: Iterable[str], summary: str) -> str:
    """Return the help, at most 80 columns wide; ``summary`` is the first line of the Run group."""
    lines: list[str] = []
    for line in makefile:
        if group := _GROUP.match(line):
            lines += ["", group["title"]]
            if group["title"] == "Run":
                lines.append(f"  {summary or _NO_CONFIG}")
        elif entry := _ENTRY.match(line):
            label = entry["label"] or entry["target"]
            lines.append(f"  {label:<{_COLUMN}}{entry['text']}")
    return "\n".join(lines[1:]) + "\n"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as makefile:
        sys.stdout.write(help_text(makefile, "".join(sys.argv[2:]).strip()))
