#!/usr/bin/env python3
"""Benchmark the trainer against transformers' GPT-2 in a plain training loop.

Also times every mechanism against GPT-2, and every optimizer against torch's fused AdamW.

    bench.py                              all cases, then mechanisms and optimizers
    bench.py --case quickstart --rounds 5
    bench.py --no-mechanisms --no-optimizers

The implementations alternate on this machine's CPU with the same AdamW settings and batches; figures
are medians, ratios are within one round. A third variant is the plain loop with the memory settings
of the trainer's workers. Mechanisms are timed with two blocks, without dropout. There is no pass or
fail; stop other load on the machine first. Requires 6 GB of memory at 124M. Tables go to stdout.
"""

import dataclasses
import json
from importlib.metadata import version

import _start

from gpt2.bench.trainer import CASES, compare, mechanisms, optimizers, to_markdown
from gpt2.planning.arguments import add_json, new_parser
from lib import console
from lib.console import log
from lib.env.gpu import cpu_model, usable_cores
from lib.errors import ConfigError, Problem


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each variant")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--no-mechanisms", action="store_true")
    parser.add_argument("--no-optimizers", action="store_true")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1:
        what = f"must be >= 1, got --rounds {args.rounds} --threads {args.threads}"
        raise ConfigError(Problem(what, "--rounds, --threads", code="usage.out-of-range"))
    machine = f"{cpu_model()}, {args.threads} threads, torch {version('torch')}"
    log("BENCH", machine)
    comparisons = [compare(c, args.threads, args.rounds, args.build_dir) for c in args.case]
    relative = {} if args.no_mechanisms else mechanisms(args.threads, args.rounds)
    updates = {} if args.no_optimizers else optimizers(args.threads, args.rounds)
    if args.json:
        cases = [dataclasses.asdict(comparison) for comparison in comparisons]
        document = {
            "schema_version": 1,
            "machine": machine,
            "cases": cases,
            "mechanisms": relative,
            "optimizers": updates,
        }
        print(json.dumps(document, sort_keys=True, allow_nan=False))
    else:
        print(f"{machine}, medians of {args.rounds} rounds (range)\n")
        print(to_markdown(comparisons, relative, updates), end="")
    return 0


if __name__ == "__main__":
    console.run_main(main)
