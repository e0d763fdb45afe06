#!/usr/bin/env python3
"""Check the style of all files (make style). Exit code 1 if there is a problem.

Runs black, ruff and mypy with the settings of pyproject.toml, and checks what no tool checks: lines
have no trailing whitespace; Kconfig files are indented with tabs; defconfigs are readable; the
documents mention only existing commands, variables, symbols and files.
scripts/fix_whitespace_issues.py fixes the problems that can be fixed automatically.
"""

import argparse

import _start

from lib.console import CommandLine, log, run_main
from lib.errors import EXIT_DONE, EXIT_FAILED
from lib.project import ROOT
from lib.style.check import TOOLS, run_tool, style_problems


def main() -> int:
    """Print the problems, and one line with the result of each check."""
    CommandLine(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    reports = {"tree": "\n".join(map(str, style_problems(ROOT)))}
    reports |= {name: run_tool(name, ROOT) for name in TOOLS}
    for report in filter(None, reports.values()):
        print(report)
    failed = [name for name, report in reports.items() if report]
    log("STYLE", f"problems: {', '.join(failed)}" if failed else "no problems")
    return EXIT_FAILED if failed else EXIT_DONE


if __name__ == "__main__":
    run_main(main)
