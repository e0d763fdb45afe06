#!/usr/bin/env python3
"""Let runs at work finish their optimizer step, save and stop; make goes on with them later.

stop.py                   all of them, and the make that trains them: as one Ctrl-C in it
stop.py --runs 'ra*,7'    some of them; make goes on with the others
"""

import _start

from gpt2.arguments import add_selection, add_variable, asked_plan, new_parser
from lib import cli
from lib.runner import stop


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "runs", "only the runs that these patterns match")
    given = parser.parse_args()
    _, plan = asked_plan(given)
    if given.runs:
        return stop.stop_runs(plan.matching(given.runs))
    return stop.stop_all(plan.folder)


if __name__ == "__main__":
    cli.run(main)
