#!/usr/bin/env python3
"""Time each setting that trades speed for bits or memory, changed alone on what .config says.

    bench_knobs.py                                 all that this device has
    bench_knobs.py --sym COMPILE,PRECISION         these symbols and choices
    bench_knobs.py --iters 50 --rounds 5

For each: tokens a second and their ratio to the base of the same round, peak memory, the loss after
so many steps, and whether the weights are the base's to the bit. Every measurement is a process of
its own; the arms take turns; figures are medians of at least 3 rounds, with the range. It is refused
while CHECK_NUMERICS or DETECT_ANOMALY is on. Nothing passes or fails: quiet the machine first. The
table goes to stdout.
"""

import json
from dataclasses import asdict

import _start

from gpt2.arguments import add_json, add_variable, new_parser, whole_number
from gpt2.bench import knobs
from gpt2.data.prepare import prepare
from gpt2.planning import config_layers
from lib import cli
from lib.errors import ConfigError
from lib.kconfig import Tree

STEPS = 20


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    add_variable(parser, "sym", "these symbols and choices alone")
    add_variable(parser, "iters", f"steps that are timed, {STEPS} unless said")
    parser.add_argument("--rounds", type=int, default=knobs.FEWEST_ROUNDS)
    given = parser.parse_args()
    steps = whole_number(given.iters or str(STEPS), "ITERS")
    if steps < 1 or given.rounds < knobs.FEWEST_ROUNDS:
        raise ConfigError(f"ITERS is at least 1, and --rounds at least {knobs.FEWEST_ROUNDS}")
    every, left_out = knobs.arms(Tree(), config_layers(given.build_dir), given.sym)
    prepare(every[0].config.data, given.build_dir)
    figures = knobs.measure(
        every, given.rounds, lambda arm: knobs.train_arm(arm, steps, given.build_dir)
    )
    if given.json:
        rows = {name: [asdict(f) for f in found] for name, found in figures.items()}
        reasons = [problem.what for problem in left_out]
        print(json.dumps({"schema_version": 1, "arms": rows, "left_out": reasons}, sort_keys=True))
    else:
        print(knobs.to_markdown(figures), end="")
        for problem in left_out:
            print(f"left out  {problem}")
    return 0


if __name__ == "__main__":
    cli.run(main)
