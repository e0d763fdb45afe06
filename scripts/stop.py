#!/usr/bin/env python3
"""Stop running runs after the current optimizer step and save a checkpoint. make resumes them.

stop.py                   all runs, and every make that trains them, on any machine
stop.py --runs 'ra*,7'    selected runs; make continues with the others
"""

import _start

from gpt2.planning.arguments import add_selection, add_variable, asked_plan, new_parser
from lib import console
from lib.runner import runner


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "runs", "only the runs that match these patterns")
    args = parser.parse()
    _, plan = asked_plan(args)
    if args.runs:
        return runner.request_stop(plan.matching(args.runs))
    return runner.stop_study(plan.runs, plan.folder)


if __name__ == "__main__":
    console.run_main(main)
