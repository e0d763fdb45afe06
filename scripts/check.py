#!/usr/bin/env python3
"""Verify on this CPU, in seconds, that every step implements what its name says.

    check.py                              .config, or the RATIO study if there is no .config
    check.py --steps 7 --checks causal    one property of one step
    check.py --fast                       without the slow checks, while editing
    check.py --defconfig gpt2-124m        another configuration than .config

Trains small versions of each step and compares them; docs/check.md describes each check. Prints a
table and one line per failure, and writes check.json to the build folder. Does not modify .config,
data or results. Exit codes: 0 all passed, 1 a check failed, 2 configuration or usage.
"""

import sys

import _start

from gpt2.check.command import check
from gpt2.planning.arguments import add_checking, add_json, check_request, new_parser
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_checking(parser)
    add_json(parser)
    code, text = check(check_request(parser.parse_args()))
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
