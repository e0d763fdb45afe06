#!/usr/bin/env python3
"""Go through the checklist before results are published: may these finished runs be compared?

    verify_results.py                            every finished run of .config's study
    verify_results.py --runs 'ra,baseline'       some of them, or directories
    verify_results.py --source wandb             settings as W&B has them, not the run's own record
    verify_results.py --axis COMPILE             directories that were to differ in that

Prints the checklist as Markdown, and what to publish if every row is PASS. Settings have to be equal
as the tracker has them and as the manifests have them; what a step of the study changes may differ.
UNKNOWN is nowhere recorded, or cannot be found out here, and never counts as equal. Exit codes: 0 all
pass, 2 no such run, 3 the tracker cannot be read, 4 a row is FAIL or UNKNOWN.
"""

from pathlib import Path

import _start

from gpt2.arguments import add_json, add_selection, add_variable, asked_plan, new_parser
from gpt2.planning import table_plan
from gpt2.verification.select import chosen_runs, declared_axes, whole_study
from gpt2.verification.verify import tracker, verify
from lib import cli
from lib.verify.checklist import say_failing, to_json, to_markdown


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "runs", "directories of finished runs, or patterns over .config's")
    add_variable(parser, "source", "local, offline, trackio or wandb", "local")
    add_variable(parser, "axis", "symbols that were to differ, separated by commas")
    add_json(parser)
    parser.add_argument("--folder", type=Path, help="where offline and trackio keep the runs")
    parser.add_argument("--entity", default="", help="W&B user or team")
    given = parser.parse_args()
    layers, plan = asked_plan(given)
    study = whole_study(plan, layers)
    runs = chosen_runs(plan if given.steps else table_plan(plan, layers), study, given.runs)
    ask = tracker(plan, given.source, given.folder, given.entity)
    found = verify(runs, declared_axes(study, runs, given.axis), ask, given.source)
    print(to_json(found) if given.json else to_markdown(found), end="")
    say_failing(found)
    return found.exit_code


if __name__ == "__main__":
    cli.run(main)
