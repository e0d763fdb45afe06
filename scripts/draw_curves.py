#!/usr/bin/env python3
"""Draw the loss curves of the runs that .config (or SWEEP=) asks for: curves.png beside the table.

draw_curves.py                        all that have begun
draw_curves.py --runs 'pruned-*,0'    some of them
"""

import _start

from gpt2.arguments import add_selection, add_variable, asked_plan, new_parser
from lib import cli
from lib.analysis.curves import draw_curves, read_curves
from lib.console import say


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "runs", "only the runs that these patterns match")
    given = parser.parse_args()
    _, plan = asked_plan(given)
    path = plan.folder / "curves.png"
    draw_curves(read_curves(plan.only(given.runs).runs), plan.study, path)
    say("CURVES", str(path))
    return 0


if __name__ == "__main__":
    cli.run(main)
