#!/usr/bin/env python3
"""Train finished runs again. The old run directories are moved aside, not deleted.

    rerun.py ra                 the run with this slug, every seed
    rerun.py 'mla-*,7' --yes    several runs, without confirmation

A pattern is a shell pattern over slugs, numbers, labels (ratio/05-ra) and directory names.
"""

import _start

from gpt2.planning.arguments import (
    add_json,
    add_positional,
    add_running,
    add_selection,
    asked_plan,
    new_parser,
    run_options,
)
from gpt2.running import launch
from gpt2.study.plan import table_plan
from lib import console
from lib.make_variables import require_value


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_running(parser)
    add_json(parser)
    add_positional(parser, "runs", "patterns over the names of finished runs")
    args = parser.parse()
    runs = require_value(args.runs, "RUNS", "make rerun RUNS=PATTERN")
    layers, whole = asked_plan(args)
    options = run_options(args, whole.base.study)
    plan = launch.rerun(whole, runs, yes=args.yes)
    code, text = launch.train_plan(plan, options, table_plan(whole, layers), json=args.json)
    if text:
        console.show(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
