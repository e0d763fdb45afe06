#!/usr/bin/env python3
"""Benchmark this machine: training steps beside plain loops, or sparse attention.

    bench.py                                the first run of .config, beside two plain GPT-2
    bench.py --steps ra --iters 50
    bench.py --gpu 1                        the tables of docs/gpu.md on this GPU, in 8 minutes
    bench.py nsa --tokens 2048

Without a subcommand: the trainer's step on drawn tokens, with the mechanisms of the run, beside
transformers' GPT-2 and a GPT-2 in nanoGPT's form, of the same sizes and without mechanisms. With --gpu
1: steps of GPT-2 124M, the loss, sparse attention and a training, beside the forms of others. nsa:
sparse against full attention, for whole sequences and decoding.

The sides of a case take turns; figures are medians, ratios are within one round. There is no pass or
fail; stop other load on the machine first. Tables go to stdout. To compare settings: plan.py --probe
--sweep.
"""

import _start

from gpt2.bench import commands
from gpt2.planning.arguments import add_subcommands, new_parser
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    commands.add_step_arguments(parser)
    nsa = add_subcommands(parser, {"nsa": "time sparse against full attention"})["nsa"]
    commands.add_nsa_arguments(nsa)
    args = parser.parse()
    if args.command == "nsa":
        commands.bench_nsa(args)
    commands.bench_step(args)


if __name__ == "__main__":
    console.run_main(main)
