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

from gpt2.check.command import add_check_options, check, check_request
from gpt2.planning import arguments
from lib import console


def main() -> int:
    """Run the command line."""
    parser = arguments.new_parser(__doc__)
    add_check_options(parser)
    arguments.add_json(parser)
    code, text = check(check_request(parser.parse()))
    console.show(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
