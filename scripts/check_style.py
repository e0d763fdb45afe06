#!/usr/bin/env python3
"""Check how the tree is written; make style runs it. Exit 1 when something is wrong.

Python is formatted by black; no blanks at line ends; Kconfig files are indented by tabs;
defconfigs are readable; the documents name only commands, variables, symbols and files that exist.
scripts/fix_whitespace_issues.py repairs what can be repaired.
"""

import argparse

import _start

from lib.cli import run
from lib.console import say
from lib.errors import EXIT_DONE, EXIT_FAILED
from lib.project import ROOT
from lib.style.check import style_problems
from lib.style.formatting import black_problems


def main() -> int:
    """Print one line for each problem."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    problems = style_problems(ROOT) + black_problems(ROOT)
    for problem in problems:
        print(problem)
    say("STYLE", f"{len(problems)} problems" if problems else "nothing to complain about")
    return EXIT_FAILED if problems else EXIT_DONE


if __name__ == "__main__":
    run(main)
