#!/usr/bin/env python3
"""Show the progress and remaining time of the runs of .config. Starts nothing, writes nothing.

The remaining time of a running run is its live estimate; of other runs, the one of "make plan".
"""

import sys
from pathlib import Path

import _start

from gpt2.planning.arguments import add_json, add_selection, asked_plan, new_parser
from gpt2.study import view
from lib import console
from lib.console import log
from lib.errors import PreflightError
from lib.runner import slurm


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
        console.show(f"{view.summary_line(plan, views)}\n")
    elif args.json:
        console.show(view.to_json(plan, views))
    else:
        console.show(f"{view.status_text(plan, views, console.terminal_columns(sys.stdout))}\n")
        console.show("".join(f"{job}\n" for job in _jobs(plan.folder)))
    return 0


def _jobs(folder: Path) -> list[slurm.QueuedJob]:
    """Return the study's SLURM jobs; logs why they are unknown."""
    try:
        return slurm.queued_jobs(folder)
    except PreflightError as error:
        log("WARN", str(error))
        return []


if __name__ == "__main__":
    console.run_main(main)
