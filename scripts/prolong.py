#!/usr/bin/env python3
"""Train a finished run further, as new runs that start from its weights: its forks.

    prolong.py ra --iters 240                     240 more iterations of a run in the plan of .config
    prolong.py results/ratio/ra-s1-1a2b3c4d --iters 240 --set "LEARNING_RATE=1e-4"
    prolong.py ra --iters 240 --count 3           three continuations with other data orders
    prolong.py ra --iters 240 --from 120          from the checkpoint that the run kept of iteration 120

The new runs are below a folder of the results named after the run, and the table compares all of its
forks. Their settings are the recorded ones, except for
MAX_ITERS, INIT_FROM and SEED, and for folders, commands and trackers, which are those of .config. The
learning rate follows a schedule of its own; the optimizer's state is new, except from a checkpoint. Exit codes: 1 the run failed, 2 unknown or unfinished run, or a setting without effect.
"""

import _start

from gpt2.planning.arguments import (
    add_json,
    add_positional,
    add_running,
    add_settings,
    add_variable,
    new_parser,
    run_options,
    settings_layers,
    whole_number,
)
from gpt2.running import launch
from gpt2.running.prolong import plan_prolonged, with_other_forks
from lib import console
from lib.make_variables import require_value


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_positional(parser, "run", "directory of a finished run, or a run name")
    add_variable(parser, "iters", "additional iterations")
    add_variable(parser, "seeds", "seed of the run, if the plan has several")
    add_variable(parser, "count", "number of continuations, each with its own data order")
    add_variable(parser, "from", "iteration of a kept checkpoint; default: the final weights")
    add_settings(parser)
    add_running(parser)
    add_json(parser)
    args = parser.parse()
    example = "make prolong RUN=NAME ITERS=240"
    run = require_value(args.run, "RUN", example)
    count = whole_number(require_value(args.iters, "ITERS", example), "ITERS")
    forks = whole_number(args.count or "1", "COUNT", 1)
    layers = settings_layers(args)
    named = vars(args)["from"]
    at = whole_number(named, "FROM") if named else None
    plan = plan_prolonged(run, args.build_dir, count, layers, seeds=args.seeds, count=forks, at=at)
    options = run_options(args, plan.base.study)
    code, text = launch.train_plan(plan, options, with_other_forks(plan), json=args.json)
    if text:
        console.show(text)
    return code


if __name__ == "__main__":
    console.run_main(main)
