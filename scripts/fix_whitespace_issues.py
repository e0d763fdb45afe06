#!/usr/bin/env python3
"""Fix the style problems that can be fixed automatically: whitespace, line ends, black formatting.

Prints the changed files.
"""

import argparse

import _start

from lib.cli import run
from lib.errors import EXIT_DONE
from lib.project import ROOT
from lib.style.files import text_files
from lib.style.formatting import reformat
from lib.style.whitespace import fixed


def main() -> int:
    """Rewrite the files in place."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in text_files(ROOT):
        if (better := fixed(path, text)) != text:
            path.write_text(better, encoding="utf-8")
            print(path.relative_to(ROOT))
    print(*reformat(ROOT), sep="\n")
    return EXIT_DONE


if __name__ == "__main__":
    run(main)
