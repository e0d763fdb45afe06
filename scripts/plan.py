#!/usr/bin/env python3
"""List the runs of .config and the cost of each. Starts nothing, writes nothing.

For each run: parameters, the ratio of MLP to attention parameters and the actual widths (first and
last block if they differ), FLOPs and tokens of training, time, state, and the changes against the
parent. The time of a done run is measured; other times are estimated from the done runs of the plan.
Without a done run, the estimate is this CPU's matrix product speed (marked ~), or "-" on a GPU: with
--gpu h100, it is an assumed share of the peak of that GPU (marked ~), in device hours, kWh and price too.
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
    add_variable(parser, "gpu", 'GPU whose speed is assumed, such as "h100"')
    add_json(parser)
    args = parser.parse()
    _, plan = asked_plan(args)
    views = view.look(plan, args.gpu)
    width = None if console.is_verbose() else console.terminal_columns(sys.stdout)
    text = view.to_json(plan, views) if args.json else f"{view.plan_text(plan, views, width)}\n"
    print(text, end="")
    return 0


if __name__ == "__main__":
    console.run_main(main)
