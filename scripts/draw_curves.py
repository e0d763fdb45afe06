#!/usr/bin/env python3
"""Plot the loss curves of the runs of .config (or of SWEEP=) to curves.png beside the table.

draw_curves.py                        all started runs
draw_curves.py --runs 'pruned-*,0'    selected runs, to curves-selection.png
"""

import _start

from gpt2.planning.arguments import add_json, add_selection, add_variable, asked_tables, new_parser
from lib import console
from lib.console import log
from lib.report.figures import plot_loss_curves, read_loss_curves
from lib.report.render import json_document

SCHEMA_VERSION = 1


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_json(parser)
    add_variable(parser, "runs", "only the runs that match these patterns")
    args = parser.parse()
    plan, whole, selected = asked_tables(args)
    # A selection does not replace the plot of all runs.
    selected = selected or bool(args.runs)
    path = plan.folder / ("curves-selection.png" if selected else "curves.png")
    drawn = (plan if selected else whole).only(args.runs)
    plot_loss_curves(read_loss_curves(drawn.runs), plan.study, path)
    log("CURVES", str(path))
    if args.json:
        print(json_document(SCHEMA_VERSION, {"files": [str(path)]}), end="")
    return 0


if __name__ == "__main__":
    console.run_main(main)
