#!/usr/bin/env python3
"""Verify on this CPU, in seconds, that every step implements what its name says.

    check.py                              .config, or the RATIO study if there is no .config
    check.py --steps 7 --checks causal    one property of one step
    check.py --fast                       without the slow checks, while editing
    check.py --defconfig gpt2-124m        another configuration than .config
    check.py random --count 50 --seed 1   the same checks on random valid configurations
    check.py symbols --sym DROPOUT        whether every symbol (or these) has an effect

Trains small versions of each step and compares them; docs/check.md describes each check. Prints a
table and one line per failure, and writes check.json to the build folder. random reduces a failing
configuration to a minimal one, and writes it as randcheck-NUMBER.defconfig. symbols changes each
symbol alone, on a small configuration in which it is available. Does not modify .config, data or
results. Exit codes: 0 all passed, 1 a check failed, 2 configuration or usage.
"""

import sys

import _start

from gpt2.check.command import add_check_options, check, check_request
from gpt2.check.random import add_random_check_options, randcheck, random_request
from gpt2.check.symbols import check_symbols
from gpt2.planning import arguments
from lib import console

COMMANDS = {
    "random": "run the checks on random valid configurations",
    "symbols": "verify that every symbol has an effect, or is declared to have none",
}


def main() -> int:
    """Run the command line."""
    parser = arguments.new_parser(__doc__)
    add_check_options(parser)
    arguments.add_json(parser)
    commands = arguments.add_subcommands(parser, COMMANDS)
    add_random_check_options(commands["random"])
    arguments.add_json(commands["random"])
    arguments.add_variable(commands["symbols"], "sym", "only these symbols")
    args = parser.parse()
    if args.command == "random":
        code, text = randcheck(random_request(args))
    elif args.command == "symbols":
        code, text = check_symbols(args.sym)
    else:
        code, text = check(check_request(args))
    sys.stdout.write(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
