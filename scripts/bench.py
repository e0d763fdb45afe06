#!/usr/bin/env python3
"""Time the trainer against transformers' GPT-2 in a plain loop, every mechanism against GPT-2,
and every optimizer against torch's fused AdamW.

    bench.py                              all cases, then mechanisms and optimizers
    bench.py --case quickstart --rounds 5
    bench.py --no-mechanisms --no-optimizers

The sides run in turn on this machine's CPU with the same AdamW settings and batches; figures are
medians, ratios are of one round. A third side is the plain loop with the memory settings that the
trainer starts its workers with. Mechanisms are timed in two blocks, without dropout. Nothing passes
or fails: quiet the machine first. Needs 6 GB of memory at 124M. Tables go to stdout.
"""

import dataclasses
import json
from importlib.metadata import version

import _start

from gpt2.arguments import add_json, new_parser
from gpt2.bench.cases import CASES
from gpt2.bench.compare import compare, mechanisms, optimizers, to_markdown
from lib import cli
from lib.console import say
from lib.errors import ConfigError
from lib.machine.devices import cpu_model, usable_cores


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_json(parser)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of both sides")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--no-mechanisms", action="store_true")
    parser.add_argument("--no-optimizers", action="store_true")
    given = parser.parse_args()
    if given.rounds < 1 or given.threads < 1:
        raise ConfigError("--rounds and --threads take a whole number of at least 1")
    machine = f"{cpu_model()}, {given.threads} threads, torch {version('torch')}"
    say("BENCH", machine)
    found = [compare(c, given.threads, given.rounds, given.build_dir) for c in given.case]
    relative = {} if given.no_mechanisms else mechanisms(given.threads, given.rounds)
    updates = {} if given.no_optimizers else optimizers(given.threads, given.rounds)
    if given.json:
        cases = [dataclasses.asdict(comparison) for comparison in found]
        document = {
            "schema_version": 1,
            "machine": machine,
            "cases": cases,
            "mechanisms": relative,
            "optimizers": updates,
        }
        print(json.dumps(document, sort_keys=True, allow_nan=False))
    else:
        print(f"{machine}, medians of {given.rounds} rounds (range)\n")
        print(to_markdown(found, relative, updates), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
