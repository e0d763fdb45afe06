#!/usr/bin/env python3
"""Plot the loss curves of the runs of .config (or of SWEEP=) to curves.png beside the table.

draw_curves.py                        all started runs
draw_curves.py --runs 'pruned-*,0'    selected runs
"""

import _start

from gpt2.arguments import add_selection, add_variable, asked_plan, new_parser
from lib import cli
from lib.analysis.curves import draw_curves, read_curves
from lib.console import say


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "runs", "only the runs that match these patterns")
    args = parser.parse_args()
    _, plan = asked_plan(args)
    path = plan.folder / "curves.png"
    draw_curves(read_curves(plan.only(args.runs).runs), plan.study, path)
    say("CURVES", str(path))
    return 0


if __name__ == "__main__":
    cli.run(main)
