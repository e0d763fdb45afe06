#!/usr/bin/env python3
"""Show the progress and remaining time of the runs of .config. Starts nothing, writes nothing.

The remaining time of a running run is its live estimate; of other runs, the one of "make plan".
"""

import sys

import _start

from gpt2.planning import view
from gpt2.planning.arguments import add_json, add_selection, asked_plan, new_parser
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    parser.add_argument("--one-line", action="store_true", help="only the summary")
    args = parser.parse()
    _, plan = asked_plan(args)
    views = view.look(plan)
    if args.one_line:
        print(view.summary_line(plan, views))
    elif args.json:
        print(view.to_json(plan, views), end="")
    else:
        print(view.status_text(plan, views, console.terminal_columns(sys.stdout)))
    return 0


if __name__ == "__main__":
    console.run_main(main)
