#!/usr/bin/env python3
"""Time what the trainer's records cost, and what trackers do, on what .config says.

    bench_overhead.py                        9 pairs of 120 iterations of each question
    bench_overhead.py --n 15 --iters 300

The trainer (manifest, rows, digests, heartbeat, telemetry, the look at every number) against a bare
loop of the same model, optimizer and batches, which keeps nothing; and the trainer with W&B offline,
trackio and TensorBoard against the trainer without. Every training is a process of its own, started
as make starts it; the sides take turns. Timed are whole iterations, without the first 3; start-up
is told apart. Told is the median of the pairs' ratios with an exact interval from their order, of
wall time and of processor time, and whether all sides came to the same weights. Nothing passes or
fails: quiet the machine first. Needs the extras trackio and tensorboard.
"""

import _start

from gpt2.arguments import add_json, add_variable, new_parser, whole_number
from gpt2.bench import overhead
from gpt2.data.prepare import prepare
from gpt2.planning import config_layers
from lib import cli
from lib.errors import ConfigError
from lib.kconfig import Tree

ITERATIONS = 120


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    add_variable(parser, "n", f"pairs of each question, {overhead.FEWEST_PAIRS} unless said")
    add_variable(parser, "iters", f"iterations that are timed, {ITERATIONS} unless said")
    given = parser.parse_args()
    pairs = whole_number(given.n or str(overhead.FEWEST_PAIRS), "N")
    iterations = whole_number(given.iters or str(ITERATIONS), "ITERS")
    if iterations < 1 or pairs < overhead.FEWEST_PAIRS:
        raise ConfigError(f"ITERS is at least 1, and N at least {overhead.FEWEST_PAIRS}")
    asked = overhead.questions(Tree(), config_layers(given.build_dir), iterations)
    prepare(asked[0].on.config.data, given.build_dir)
    answers = overhead.measure(
        asked, pairs, lambda side: overhead.train_side(side, given.build_dir)
    )
    tell = overhead.to_json if given.json else overhead.to_text
    print(tell(answers, iterations), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
