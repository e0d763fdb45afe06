#!/usr/bin/env python3
"""Fix the style problems that can be fixed automatically: whitespace, line ends, black formatting.

Prints the changed files.
"""

import argparse

import _start

from lib.console import run_main
from lib.errors import EXIT_DONE
from lib.project import ROOT
from lib.style.check import fix_whitespace, reformat, text_files


def main() -> int:
    """Rewrite the files in place."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in text_files(ROOT):
        if (better := fix_whitespace(path, text)) != text:
            path.write_text(better, encoding="utf-8")
            print(path.relative_to(ROOT))
    print(*reformat(ROOT), sep="\n")
    return EXIT_DONE


if __name__ == "__main__":
    run_main(main)
