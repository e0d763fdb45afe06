#!/usr/bin/env python3
"""Train one run in this process: errors keep their traceback, and a debugger reaches everything.

    train.py                    the configured training
    train.py --steps 7          one step of a study
    python -m pdb scripts/train.py --steps 7

Ctrl-C saves and stops; the same command goes on.
"""

import _start

from gpt2 import launch
from gpt2.arguments import add_selection, new_parser
from gpt2.planning import config_layers, make_plan
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    given = parser.parse_args()
    layers = config_layers(given.build_dir)
    plan = make_plan(layers, given.build_dir, steps=given.steps, seeds=given.seeds)
    return launch.train_here(plan)


if __name__ == "__main__":
    cli.run(main)
