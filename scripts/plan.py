#!/usr/bin/env python3
"""List the runs that .config asks for, and what each costs. Starts nothing, writes nothing.

For each run: parameters, the ratio of MLP to attention parameters and the widths as built (first
and last block, where they differ), FLOPs and tokens of training, time, state, and what changes
against its parent. Time is measured where a run is done, and estimated from the done runs of the
plan; before there is one, from this CPU's speed at matrix products (marked ~), or "-" on a GPU.
"""

import _start

from gpt2 import overview
from gpt2.arguments import add_json, add_selection, asked_plan, new_parser
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    given = parser.parse_args()
    _, plan = asked_plan(given)
    views = overview.look(plan)
    print(overview.to_json(plan, views) if given.json else overview.plan_text(plan, views))
    return 0


if __name__ == "__main__":
    cli.run(main)
