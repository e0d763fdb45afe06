#!/usr/bin/env python3
"""Benchmark each setting that trades speed for precision or memory, one at a time on .config.

    bench_knobs.py                                 all settings that this device supports
    bench_knobs.py --sym COMPILE,PRECISION         these symbols and choices
    bench_knobs.py --iters 50 --rounds 5

For each setting: tokens per second and their ratio to the base of the same round, peak memory, the
final loss, and whether the weights are bitwise equal to the base. Each measurement is a separate
process; the settings alternate; figures are medians of at least 3 rounds, with the range. Rejected
while CHECK_NUMERICS or DETECT_ANOMALY is on. There is no pass or fail; stop other load on the
machine first. The table goes to stdout.
"""

import json
from dataclasses import asdict

import _start

from gpt2.bench import settings
from gpt2.data.prepare import prepare_dataset
from gpt2.planning.arguments import add_json, add_variable, new_parser, whole_number
from gpt2.planning.plan import config_layers
from lib import console
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem

STEPS = 20


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    add_variable(parser, "sym", "only these symbols and choices")
    add_variable(parser, "iters", f"timed steps (default {STEPS})")
    parser.add_argument("--rounds", type=int, default=settings.MIN_ROUNDS)
    args = parser.parse_args()
    steps = whole_number(args.iters or str(STEPS), "ITERS")
    if steps < 1 or args.rounds < settings.MIN_ROUNDS:
        what = (
            f"expected ITERS >= 1 and --rounds >= {settings.MIN_ROUNDS}, "
            f"got {steps} and {args.rounds}"
        )
        raise ConfigError(Problem(what, "ITERS, --rounds", code="usage.out-of-range"))
    arms, skipped = settings.variants(KconfigTree(), config_layers(args.build_dir), args.sym)
    prepare_dataset(arms[0].config.data, args.build_dir)
    figures = settings.measure(
        arms, args.rounds, lambda arm: settings.train_variant(arm, steps, args.build_dir)
    )
    if args.json:
        rows = {name: [asdict(f) for f in rounds] for name, rounds in figures.items()}
        reasons = [problem.what for problem in skipped]
        print(json.dumps({"schema_version": 1, "arms": rows, "left_out": reasons}, sort_keys=True))
    else:
        print(settings.to_markdown(figures), end="")
        for problem in skipped:
            print(f"skipped  {problem}")
    return 0


if __name__ == "__main__":
    console.run_main(main)
