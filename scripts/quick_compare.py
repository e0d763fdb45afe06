#!/usr/bin/env python3
"""Train .config with and without one change for a few iterations, and compare.

    quick_compare.py RECIPROCAL=y
    quick_compare.py "RECIPROCAL=y DROPOUT=0.1" --iters 500

Results are stored in the folder "try", separate from studies; finished runs are reused. The warm-up
is at most a tenth of the run. One seed and a short run give an indication, not a result.
"""

import _start

from gpt2.planning.arguments import (
    add_json,
    add_positional,
    add_running,
    add_variable,
    new_parser,
    run_options,
    whole_number,
)
from gpt2.planning.plan import config_layers, make_trial
from gpt2.running import launch
from lib import console
from lib.config.layers import parse_command_line_settings
from lib.errors import ConfigError, Problem
from lib.make_variables import require_value


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_variable(parser, "iters", "iterations of each run (default 200)")
    add_running(parser)
    add_json(parser)
    add_positional(parser, "set", 'the settings to try, such as "A=1 B=y"')
    args = parser.parse()
    settings = require_value(args.set, "SET", 'make quick-compare SET="DROPOUT=0.1"')
    iterations = whole_number(args.iters or "200", "ITERS", 1)
    layers, change = config_layers(args.build_dir), parse_command_line_settings(settings)
    plan = make_trial(layers, args.build_dir, change, iterations)
    options = run_options(args, plan.base.study)
    code, text = launch.train_plan(plan, options, plan, json=args.json)
    if text:
        print(text, end="")
    return code


if __name__ == "__main__":
    console.run_main(main)
