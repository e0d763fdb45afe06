#!/usr/bin/env python3
"""Train one change against .config for a few iterations, both sides now, and compare.

    try_change.py RECIPROCAL=y
    try_change.py "RECIPROCAL=y DROPOUT=0.1" --iters 500

Results are kept in the folder try, apart from those of studies; the same trial is not trained
twice. The warm-up is a tenth of the run at most. One seed and a short run: a hint, no result.
"""

import _start

from gpt2 import launch
from gpt2.arguments import (
    add_json,
    add_running,
    add_variable,
    new_parser,
    run_options,
    whole_number,
)
from gpt2.planning import config_layers, make_trial
from lib import cli
from lib.errors import ConfigError, Problem
from lib.kconfig import parse_set


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "iters", "iterations of each run, 200 unless told")
    add_running(parser)
    add_json(parser)
    parser.add_argument("settings", metavar='"A=1 B=y"')
    given = parser.parse_args()
    iterations = whole_number(given.iters or "200", "ITERS")
    if iterations == 0:
        raise ConfigError(Problem("0 iterations show nothing", "ITERS"))
    layers, change = config_layers(given.build_dir), parse_set(given.settings)
    plan = make_trial(layers, given.build_dir, change, iterations)
    options = run_options(given, plan.base.study.jobs)
    code, text = launch.train_plan(plan, options, plan, json=given.json)
    if text:
        print(text, end="")
    return code


if __name__ == "__main__":
    cli.run(main)
