#!/usr/bin/env python3
"""Prove that every step is what its name says, on this CPU, in seconds, before it costs GPU hours.

    check.py                              .config, or the RATIO study where there is none
    check.py --steps 7 --checks causal    one property of one step
    check.py --fast                       without the slow checks, while editing
    check.py --defconfig gpt2-124m        a configuration that is not loaded

Trains small forms of each step and compares; docs/check.md says what each check proves. Prints a
table and one line for each failure, and writes check.json into the build folder; changes no
.config, data or results. Exit codes: 0 all passed, 1 a check failed, 2 configuration or usage.
"""

import sys

import _start

from gpt2.arguments import add_checking, add_json, check_request, new_parser
from gpt2.check.command import check
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_checking(parser)
    add_json(parser)
    code, text = check(check_request(parser.parse_args()))
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    cli.run(main)
