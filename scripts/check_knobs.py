#!/usr/bin/env python3
"""Verify that every symbol of a run has an effect, unless the symbol is declared to have none.

    check_knobs.py                              all symbols, in a minute
    check_knobs.py --sym RECIPROCAL_WINDOW      one symbol

Each symbol is changed alone on a small configuration in which it is available; model outputs,
training and evaluation are compared. A symbol without effect is reported with its file and line.
Exit codes: 0 all passed, 1 one failed, 2 usage.
"""

import sys

import _start

from gpt2.check.symbols import check_symbols
from gpt2.planning.arguments import add_variable, new_parser
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "sym", "only these symbols")
    code, text = check_symbols(parser.parse_args().sym)
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
