#!/usr/bin/env python3
"""Fix whitespace, formatting and lint of the files below the working directory.

No line ends with blanks, a file ends with one newline, and Kconfig files and Makefiles are indented
with tabs. Prints the changed files, then runs ruff with its safe fixes, and black. With --check,
lists the files instead; the exit code is 1 if there are any.
"""

import argparse
import re
import subprocess
from pathlib import Path

import _start

from lib.console import CommandLine, run_main, show
from lib.errors import EXIT_DONE, EXIT_FAILED
from lib.project import python_module_command


def fixed(path: Path, text: str) -> str:
    """Return ``text`` with its whitespace corrected."""
    text = re.sub(r"[ \t\r]+$", "", text, flags=re.MULTILINE).rstrip("\n")
    text += "\n" if text else ""
    if path.name.startswith(("Kconfig", "Makefile")):
        text = re.sub("^(?: {8})+", lambda m: "\t" * (len(m[0]) // 8), text, flags=re.MULTILINE)
    return text


def main() -> int:
    """Rewrite the files in place, or list them."""
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    # Those that git tracks or could add; a binary file contains a zero byte.
    listed = ["git", "grep", "-lIz", "--untracked", "--exclude-standard", ""]
    names = subprocess.run(listed, capture_output=True, check=True, encoding="utf-8").stdout
    changed = 0
    for path in map(Path, filter(None, names.split("\0"))):
        text = path.read_bytes().decode()
        if (better := fixed(path, text)) != text:
            changed += 1
            show(f"{path}\n")
            if not check:
                path.write_bytes(better.encode())
    for tool in [] if check else (["ruff", "check", "--fix", "--exit-zero"], ["black", "."]):
        subprocess.run(python_module_command(*tool), check=True)
    return EXIT_FAILED if check and changed else EXIT_DONE


if __name__ == "__main__":
    run_main(main)
