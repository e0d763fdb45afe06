#!/usr/bin/env python3
"""Check whether finished runs are comparable and can be published together.

    verify_results.py                            every finished run of .config's study
    verify_results.py --runs 'ra,baseline'       selected runs, or directories
    verify_results.py --source wandb             settings as stored by W&B instead of the run record
    verify_results.py --axis COMPILE             directories that may differ in COMPILE

Prints a Markdown checklist, and the facts to publish if every row is PASS. Settings must be equal
both in the tracker and in the manifests, except for the changes of the study's steps. Every step
must have the same seeds, at least FINALIST_MIN_SEEDS. UNKNOWN means not recorded or not available
here, and never counts as equal. Exit codes: 0 all rows pass, 2 no such run, 3 the tracker cannot be
read, 4 a row is FAIL or UNKNOWN.
"""

from pathlib import Path

import _start

from gpt2.planning.arguments import (
    add_json,
    add_selection,
    add_variable,
    asked_plan,
    new_parser,
    selects_runs,
)
from gpt2.records.comparison import chosen_runs, declared_axes, whole_study
from gpt2.records.report import study_document_of
from gpt2.records.verification import tracker, verify
from gpt2.running import launch
from gpt2.study.plan import table_plan
from lib import console
from lib.report.checklist import checklist_to_json, checklist_to_markdown, log_failing
from lib.report.checklist_rows import word_rows


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_variable(parser, "runs", "directories of finished runs, or patterns over .config's")
    add_variable(parser, "source", "local, offline, trackio or wandb", "local")
    add_variable(parser, "axis", "comma-separated symbols that may differ")
    add_json(parser)
    parser.add_argument("--folder", type=Path, help="folder of the offline or trackio runs")
    parser.add_argument("--entity", default="", help="W&B user or team")
    args = parser.parse()
    layers, plan = asked_plan(args)
    ask = tracker(plan, args.source, args.folder, args.entity)
    study = whole_study(plan, layers)
    table = table_plan(plan, layers)
    runs = chosen_runs(plan if selects_runs(args) else table, study, args.runs)
    axes, min_seeds = declared_axes(study, runs, args.axis), plan.base.repro.finalist_min_seeds
    paths = {run.path.resolve() for run in runs}
    names = {run.path.name for run in table.runs if run.path.resolve() in paths}
    document = study_document_of(table, launch.result_table(table))
    words = word_rows(document, names, plan.folder) if names else ()
    checklist = verify(runs, axes, ask, args.source, min_seeds, words)
    console.show(checklist_to_json(checklist) if args.json else checklist_to_markdown(checklist))
    log_failing(checklist["rows"])
    return int(checklist["exit_code"])


if __name__ == "__main__":
    console.run_main(main)
