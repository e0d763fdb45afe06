#!/usr/bin/env python3
"""Write the figures of .config's report as PDF, PNG (300 dots per inch) and SVG files.

The figures are those of report.html: differences with intervals and verdicts, loss curves, loss
against cost, documents, statistics of mechanisms. They are written into the folder "figures" beside
the runs, those of selected runs into "figures-selection"; nothing is trained. Exit code 2 if no run
has a result, 3 without matplotlib.

draw_figures.py                        all finished runs
draw_figures.py --runs 'pruned-*,0'    selected runs
"""

import _start

from gpt2.planning.arguments import add_json, add_selection, add_variable, asked_tables, new_parser
from gpt2.records.report import SELECTION_FOLDER, draw_figures
from gpt2.running import launch
from lib import console
from lib.console import log
from lib.report.figures import FIGURES_FOLDER
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
    shown = (plan if selected else whole).only(args.runs)
    # A selection does not replace the figures of all runs.
    folder = SELECTION_FOLDER if selected or args.runs else FIGURES_FOLDER
    table = launch.result_table(whole).of_runs({run.path for run in shown.runs})
    paths = draw_figures(shown, table, folder)
    log("FIGURES", f"{paths[0].parent}: {len(paths)} files")
    if args.json:
        console.show(json_document(SCHEMA_VERSION, {"files": [str(path) for path in paths]}))
    return 0


if __name__ == "__main__":
    console.run_main(main)
