#!/usr/bin/env python3
"""Train the runs of .config: a single training, the steps of a study, or a test matrix.

    run_test_matrix.py                    all unfinished runs, then print the table
    run_test_matrix.py --steps 0-3,ra     only these steps
    run_test_matrix.py --seeds 1-3        every step with three seeds
    run_test_matrix.py --seeds auto       more seeds until every comparison has a word
    run_test_matrix.py --dry-run          check the runs, as make check does
    run_test_matrix.py --worker           train what nobody trains, without question and table (slurm)

Events go to stderr, the table to stdout. Finished runs are skipped, stopped runs are resumed. Exit
codes: 0 all done, 1 a run failed, 2 configuration, 3 machine or data (nothing started), 124 time
limit, 130 Ctrl-C; with --strict those of verdicts.py too.
"""

import _start

from gpt2.check.cases import plan_cases
from gpt2.check.command import CheckRequest, check_and_report
from gpt2.planning.arguments import (
    add_dry_run,
    add_json,
    add_running,
    add_selection,
    add_strict,
    add_variable,
    asked_plan,
    new_parser,
    run_options,
)
from gpt2.running import launch
from gpt2.study.plan import table_plan
from gpt2.study.power import confirm_power
from lib import console


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_running(parser)
    add_json(parser)
    add_strict(parser)
    add_variable(parser, "runs", "only the runs that match these patterns")
    add_dry_run(parser)
    parser.add_argument("--worker", action="store_true", help="train runs until none is free")
    args = parser.parse()
    layers, plan = asked_plan(args)
    plan = plan.only(args.runs)
    options = run_options(args, plan.base.study)
    if args.dry_run or plan.base.study.dry_run:
        cases = plan_cases(layers, build_dir=args.build_dir).only(
            [run.variant.slug for run in plan.runs]
        )
        code, text = check_and_report(cases, CheckRequest(args.build_dir, json=args.json))
        console.show(text)
        return code
    if args.worker:
        return launch.train_free_runs(plan, options)
    confirm_power(plan, args.yes)
    if plan.auto is not None:
        code, text = launch.train_looks(plan, options, layers, json=args.json, strict=args.strict)
    else:
        shown = table_plan(plan, layers)
        code, text = launch.train_plan(plan, options, shown, json=args.json, strict=args.strict)
    if text:
        console.show(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
