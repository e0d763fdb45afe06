#!/usr/bin/env python3
"""Fix the style problems that can be fixed automatically: whitespace, formatting, order of imports.

Prints the changed files; runs black, and ruff with its safe fixes.
"""

import subprocess

import _start

from lib.console import CommandLine, run_main
from lib.errors import EXIT_DONE
from lib.project import ROOT, python_module_command
from lib.style.check import fix_whitespace, text_files


def main() -> int:
    """Rewrite the files in place."""
    CommandLine(description=__doc__).parse_args()
    for path, text in text_files(ROOT):
        if (better := fix_whitespace(path, text)) != text:
            path.write_text(better, encoding="utf-8")
            print(path.relative_to(ROOT))
    for tool, *arguments in (["ruff", "check", "--fix", "--silent", "--exit-zero"], ["black", "."]):
        subprocess.run(python_module_command(tool, *arguments), cwd=ROOT, check=False)
    return EXIT_DONE


if __name__ == "__main__":
    run_main(main)
