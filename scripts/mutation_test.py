#!/usr/bin/env python3
"""Plant faults in the product one at a time, and report how many of them make check catches.

    mutation_test.py                                 60 faults, drawn from all areas
    mutation_test.py --count 150 --seed 2            more, and others
    mutation_test.py --area pruning,schedule         of some areas
    mutation_test.py --area lib/optim/schedule.py:40 of one line

A fault changes one expression or statement that training or evaluation executes; the checks run on
configurations that execute it, in forked processes. A fault that no check catches and that changes
no result is equivalent, and does not count. docs/check.md describes the operators and the rules.
Writes mutation-test.json to the build folder; nothing in the tree is modified. Exit codes: 0 the
goal is reached, 1 it is not, or a check fails without a fault; 2 usage.
"""

import sys

import _start

from gpt2.mutation.command import add_mutation_options, mutation_request, mutation_test
from gpt2.planning import arguments
from lib import console


def main() -> int:
    """Run the command line."""
    parser = arguments.new_parser(__doc__)
    add_mutation_options(parser)
    arguments.add_json(parser)
    code, text = mutation_test(mutation_request(parser.parse()))
    console.show(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
