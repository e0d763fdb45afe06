#!/usr/bin/env python3
"""Train small models to look up what stands far back: with selected blocks, drawn ones, a window.

    needle.py               all three, some minutes on one core
    needle.py --arms nsa    one of them
    needle.py --steps 400   of training, each; STEPS=400 and SEED=1 with make

Native sparse attention finds the answer if its selection works; with blocks that are drawn, or the
window alone, the same model has to guess; what luck drawn blocks bring is counted from their lists and
stands beside it. Progress goes to stderr, the table to stdout.
"""

import dataclasses
import json
import sys

import _start
import torch

from gpt2.arguments import add_json, add_variable, new_parser, whole_number
from gpt2.validation.needle import ARMS, STEPS, chance, to_markdown, train
from lib import cli
from lib.console import say
from lib.errors import ConfigError, Problem


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    add_variable(parser, "steps", "of training, each arm", str(STEPS))
    add_variable(parser, "seed", "of weights and sequences", "0")
    given = parser.parse_args()
    steps, seed = whole_number(given.steps, "STEPS"), whole_number(given.seed, "SEED")
    if not steps:
        raise ConfigError(Problem("there is nothing to learn in 0 steps", "STEPS"))
    torch.set_num_threads(1)
    found = {arm: train(arm, steps, seed, lambda text: say("NEEDLE", text)) for arm in given.arms}
    if given.json:
        arms = {arm: dataclasses.asdict(result) for arm, result in found.items()}
        document = {"schema_version": 1, "chance": chance(), "arms": arms}
        sys.stdout.write(json.dumps(document, sort_keys=True, allow_nan=False) + "\n")
    else:
        sys.stdout.write(to_markdown(found))
    return 0


if __name__ == "__main__":
    cli.run(main)
