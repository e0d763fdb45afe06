#!/usr/bin/env python3
"""Benchmark this machine: the trainer, settings, logging overhead, or sparse attention.

    bench.py                                trainer, mechanisms and optimizers on the CPU
    bench.py --case quickstart --rounds 5 --no-mechanisms --no-optimizers
    bench.py settings --sym COMPILE,PRECISION --iters 50
    bench.py overhead --count 15 --iters 300
    bench.py nsa --tokens 2048

Without a subcommand: the trainer against transformers' GPT-2 in a plain loop (also with the memory
settings of the trainer's workers), every mechanism against GPT-2, and every optimizer against
torch's fused AdamW. settings: each setting that trades speed for precision or memory, one at a time
on .config, with peak memory, final loss, and whether the weights are bitwise equal. overhead: the
trainer's logging against a bare loop, and trackers against none; requires the extras trackio and
tensorboard. nsa: sparse against full attention, for whole sequences and decoding; writes
bench_nsa.csv and bench_nsa.png to the build folder.

Variants alternate; figures are medians, ratios are within one round. There is no pass or fail; stop
other load on the machine first. Tables go to stdout.
"""

import _start

from gpt2.bench.commands import BENCHMARKS
from gpt2.planning.arguments import add_subcommands, new_parser
from lib import console

COMMANDS = {
    "settings": "time each speed-related setting on .config",
    "overhead": "time the trainer's logging, and the trackers",
    "nsa": "time sparse against full attention",
}


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    BENCHMARKS[""].add_arguments(parser)
    for name, command in add_subcommands(parser, COMMANDS).items():
        BENCHMARKS[name].add_arguments(command)
    args = parser.parse()
    code, text = BENCHMARKS[args.command or ""].run(args)
    print(text, end="")
    return code


if __name__ == "__main__":
    console.run_main(main)
