#!/usr/bin/env python3
"""List the runs of .config and the cost of each. Starts nothing, writes nothing.

For each run: parameters, the ratio of MLP to attention parameters and the actual widths (first and
last block if they differ), FLOPs and tokens of training, time, state, and the changes against the
parent. The time of a done run is measured; other times are estimated from the done runs of the plan.
Without a done run, the estimate is this CPU's matrix product speed (marked ~), or "-" on a GPU. With
--gpu h100, step time, tokens per second, MFU, launches and memory of a step on this GPU are predicted
from the kernels that the step would launch (docs/gpu.md), with device hours, kWh and price.
"""

import sys

import _start

from gpt2.planning import view
from gpt2.planning.arguments import add_json, add_selection, add_variable, asked_plan, new_parser
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "gpu", 'predict the steps on this GPU, such as "h100"')
    add_json(parser)
    args = parser.parse()
    _, plan = asked_plan(args)
    views = view.look(plan, args.gpu, args.build_dir)
    width = None if console.is_verbose() else console.terminal_columns(sys.stdout)
    text = view.to_json(plan, views) if args.json else f"{view.plan_text(plan, views, width)}\n"
    print(text, end="")
    return 0


if __name__ == "__main__":
    console.run_main(main)
