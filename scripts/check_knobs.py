#!/usr/bin/env python3
"""Prove that every symbol of a run acts, and that those declared to change nothing do not.

    check_knobs.py                              all of them, in a minute
    check_knobs.py --sym RECIPROCAL_WINDOW      one

Each is changed alone on a small configuration that makes it available; what the model computes,
what the trainer makes of it and how it is evaluated are compared. A symbol that changes none of it is
named with its file and line. Exit codes: 0 all passed, 1 one failed, 2 usage.
"""

import sys

import _start

from gpt2.arguments import add_variable, new_parser
from gpt2.check.knobs import check_knobs
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "sym", "these symbols alone")
    code, text = check_knobs(parser.parse_args().sym)
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    cli.run(main)
