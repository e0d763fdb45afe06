#!/usr/bin/env python3
"""Check the style of all files (make style). Exit code 1 if there is a problem.

Python files are formatted by black; lines have no trailing whitespace; Kconfig files are indented
with tabs; defconfigs are readable; the documents mention only existing commands, variables, symbols
and files. scripts/fix_whitespace_issues.py fixes the problems that can be fixed automatically.
"""

import argparse

import _start

from lib.console import log, run_main
from lib.errors import EXIT_DONE, EXIT_FAILED
from lib.project import ROOT
from lib.style.check import black_problems, style_problems


def main() -> int:
    """Print one line for each problem."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    problems = style_problems(ROOT) + black_problems(ROOT)
    for problem in problems:
        print(problem)
    log("STYLE", f"{len(problems)} problems" if problems else "no problems")
    return EXIT_FAILED if problems else EXIT_DONE


if __name__ == "__main__":
    run_main(main)
