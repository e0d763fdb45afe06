#!/usr/bin/env python3
"""List the runs of .config and the cost of each. Trains nothing, writes nothing.

For each run: parameters, the ratio of MLP to attention parameters and the actual widths (first and
last block if they differ), FLOPs and tokens of training, time, state, and the changes against the
parent. The time of a done run is measured; other times are estimated from the done runs of the plan.
Without a done run, the estimate is this CPU's matrix product speed (marked ~), or "-" on a GPU. With
--probe, some steps and an evaluation of each distinct model are timed on this machine, on drawn
tokens. With --gpu h100, the memory of a step on this GPU is predicted, and the time is that of a
stated share of its peak (docs/gpu.md).
"""

import sys

import _start

from gpt2.planning.arguments import (
    add_json,
    add_probe,
    add_selection,
    add_variable,
    asked_plan,
    new_parser,
)
from gpt2.study import view
from lib import console
from lib.errors import ConfigError, Problem


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "gpu", 'estimate time and memory on this GPU, such as "h100"')
    add_probe(parser)
    add_json(parser)
    args = parser.parse()
    if args.probe and args.gpu:
        what = f"conflicts with GPU={args.gpu} (expected one of both)"
        advice = "type: make plan PROBE=1, on the machine with the GPU"
        raise ConfigError(Problem(what, "PROBE", advice, code="usage.conflict"))
    _, plan = asked_plan(args)
    views = view.look(plan, args.gpu, args.probe)
    width = None if console.is_verbose() else console.terminal_columns(sys.stdout)
    text = view.to_json(plan, views) if args.json else f"{view.plan_text(plan, views, width)}\n"
    console.show(text)
    return 0


if __name__ == "__main__":
    console.run_main(main)
