#!/usr/bin/env python3
"""Train what .config asks for: one training, the steps of a study, or a test matrix.

    run_test_matrix.py                    what is not done yet, then the table
    run_test_matrix.py --steps 0-3,ra     these steps alone
    run_test_matrix.py --seeds 1-3        every step with three seeds
    run_test_matrix.py --dry-run          check them, as make check does

Events go to stderr, the table to stdout. Runs that are done are skipped, runs that were stopped go
on. Exit codes: 0 all done, 1 a run failed, 2 configuration, 3 machine or data (nothing started),
124 time limit, 130 Ctrl-C.
"""

import _start

from gpt2 import launch
from gpt2.arguments import add_json, add_running, add_selection, asked_plan, new_parser, run_options
from gpt2.check.cases import find_cases
from gpt2.check.command import Request, check_cases
from gpt2.planning import table_plan
from lib import cli


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_running(parser)
    add_json(parser)
    parser.add_argument("--runs", default="", help="only the runs that these patterns match")
    parser.add_argument("--dry-run", action="store_true", help="check, do not train")
    given = parser.parse_args()
    layers, plan = asked_plan(given)
    plan = plan.only(given.runs)
    if given.dry_run or plan.base.study.dry_run:
        cases = find_cases(layers).only([run.variant.slug for run in plan.runs])
        code, text = check_cases(cases, Request(given.build_dir, json=given.json))
        print(text, end="")
        return code
    options = run_options(given, plan.base.study.jobs)
    code, text = launch.train_plan(plan, options, table_plan(plan, layers), json=given.json)
    if text:
        print(text, end="")
    return code


if __name__ == "__main__":
    cli.run(main)
