#!/usr/bin/env python3
"""How far the runs of .config are, and the time left. Starts nothing, writes nothing.

The time left of a run at work is its own estimate; of the others, that of "make plan".
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
    parser.add_argument("--one-line", action="store_true", help="the summary alone")
    given = parser.parse_args()
    _, plan = asked_plan(given)
    views = overview.look(plan)
    if given.one_line:
        print(overview.summary_line(plan, views))
    elif given.json:
        print(overview.to_json(plan, views))
    else:
        print(overview.status_text(plan, views))
    return 0


if __name__ == "__main__":
    cli.run(main)
