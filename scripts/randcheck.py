#!/usr/bin/env python3
"""Run the checks of check.py on random valid configurations.

    randcheck.py --n 50 --seed 1          50 configurations, determined by the seed
    randcheck.py --n 500 --fast           without the slow checks
    randcheck.py --checks causal,reload   only these checks

A failing configuration is reduced to a minimal set of symbols that still fails the same check,
printed as a defconfig, and written to the build folder as randcheck-NUMBER.defconfig with the
command that repeats it. Does not modify .config, data or results. Exit codes: 0 all passed, 1 one
failed, 2 usage.
"""

import sys

import _start

from gpt2.check.random import randcheck
from gpt2.planning.arguments import add_json, add_random_checking, new_parser, random_request
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_random_checking(parser)
    add_json(parser)
    code, text = randcheck(random_request(parser.parse_args()))
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
