#!/usr/bin/env python3
"""Benchmark the overhead of the trainer's logging and of trackers, for the configuration .config.

    bench_overhead.py                        9 pairs of 120 iterations per comparison
    bench_overhead.py --n 15 --iters 300

Compares the trainer (manifest, per-document rows, digests, heartbeat, telemetry, non-finite checks)
with a bare loop of the same model, optimizer and batches without logging; and the trainer with W&B
offline, trackio and TensorBoard with the trainer without trackers. Each training is a separate
process, started as make starts it; the variants alternate. Whole iterations are timed, without the
first 3; start-up is reported separately. Reports the median ratio of the pairs with an exact
order-statistic interval, for wall time and CPU time, and whether all variants have the same final
weights. There is no pass or fail; stop other load on the machine first. Requires the extras trackio
and tensorboard.
"""

import _start

from gpt2.bench import overhead
from gpt2.data.prepare import prepare_dataset
from gpt2.planning.arguments import add_json, add_variable, new_parser, whole_number
from gpt2.planning.plan import config_layers
from lib import console
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem

ITERATIONS = 120


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    add_variable(parser, "n", f"pairs per comparison (default {overhead.MIN_PAIRS})")
    add_variable(parser, "iters", f"timed iterations (default {ITERATIONS})")
    args = parser.parse_args()
    pairs = whole_number(args.n or str(overhead.MIN_PAIRS), "N")
    iterations = whole_number(args.iters or str(ITERATIONS), "ITERS")
    if iterations < 1 or pairs < overhead.MIN_PAIRS:
        what = f"expected ITERS >= 1 and N >= {overhead.MIN_PAIRS}, got {iterations} and {pairs}"
        raise ConfigError(Problem(what, "ITERS, N", code="usage.out-of-range"))
    comparisons = overhead.comparisons(KconfigTree(), config_layers(args.build_dir), iterations)
    prepare_dataset(comparisons[0].on.config.data, args.build_dir)
    results = overhead.measure(
        comparisons, pairs, lambda side: overhead.train_side(side, args.build_dir)
    )
    render = overhead.to_json if args.json else overhead.to_text
    print(render(results, iterations), end="")
    return 0


if __name__ == "__main__":
    console.run_main(main)
