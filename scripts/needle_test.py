#!/usr/bin/env python3
"""Train small models on long-range retrieval: with selected blocks, random blocks, and a window.

    needle_test.py               all three arms, a few minutes on one core
    needle_test.py --arms nsa    one arm
    needle_test.py --steps 400   training steps per arm; STEPS=400 and SEED=1 with make

Native sparse attention solves the task if its selection works. With random blocks, or with the
window only, the same model has to guess; the table includes the chance level of random blocks.
Progress goes to stderr, the table to stdout.
"""

import dataclasses
import json
import sys

import _start
import torch

from gpt2.nsa.needle import STEPS, VARIANTS, chance, to_markdown, train_and_evaluate
from gpt2.planning.arguments import add_json, add_variable, new_parser, whole_number
from lib import console
from lib.console import log
from lib.errors import ConfigError, Problem


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    parser.add_argument("--arms", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    add_variable(parser, "steps", "training steps per arm", str(STEPS))
    add_variable(parser, "seed", "random seed of weights and sequences", "0")
    args = parser.parse()
    steps, seed = whole_number(args.steps, "STEPS", 1), whole_number(args.seed, "SEED")
    torch.set_num_threads(1)
    results = {
        arm: train_and_evaluate(arm, steps, seed, lambda text: log("NEEDLE", text))
        for arm in args.arms
    }
    if args.json:
        arms = {arm: dataclasses.asdict(result) for arm, result in results.items()}
        document = {"schema_version": 1, "chance": chance(), "arms": arms}
        console.show(json.dumps(document, sort_keys=True, allow_nan=False) + "\n")
    else:
        console.show(to_markdown(results))
    return 0


if __name__ == "__main__":
    console.run_main(main)
