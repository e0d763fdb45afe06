#!/usr/bin/env python3
"""Check random configurations that Kconfig and all rules allow, as check.py checks configured ones.

    randcheck.py --n 50 --seed 1          50 configurations; the same ones for the same seed
    randcheck.py --n 500 --fast           without the slow checks
    randcheck.py --checks causal,reload   these alone

A configuration that fails is reduced to the fewest symbols that still fail the same check, printed
as a defconfig, and written to the build folder as randcheck-NUMBER.defconfig, with the command that
repeats it. Changes no .config, data or results. Exit codes: 0 all passed, 1 one failed, 2 usage.
"""

import sys

import _start

from gpt2.arguments import add_json, add_random_checking, new_parser, random_request
from gpt2.check.randcheck import randcheck
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_random_checking(parser)
    add_json(parser)
    code, text = randcheck(random_request(parser.parse_args()))
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    cli.run(main)
