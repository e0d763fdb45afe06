#!/usr/bin/env python3
"""Check whether this machine and environment can train the runs of .config.

    preflight_env.py              one line per fact and condition
    preflight_env.py --json       the same as one JSON document

Runs all checks that every training command runs before it starts, and writes the environment
snapshot (the folder "environment" beside .config). Does not train or download anything. Exit codes:
0 all conditions are met that can be tested here, 2 configuration, 3 a condition is not met.
"""

import json
import os

import _start

from gpt2.planning.arguments import add_allow_dirty, add_json, add_selection, asked_plan, new_parser
from lib import console
from lib.env.machine import worker_environment
from lib.errors import EXIT_DONE, EXIT_PREFLIGHT


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_allow_dirty(parser)
    add_json(parser)
    args = parser.parse()
    _, plan = asked_plan(args)
    # The same environment variables as in a run: libraries read them at import.
    os.environ.update(worker_environment(plan.base.machine))
    from gpt2.running import preflight

    place = preflight.TrainingPlace(plan.build_dir, plan.folder, args.allow_dirty)
    report = preflight.describe([run.config for run in plan.runs], place)
    as_json = json.dumps(report, sort_keys=True, allow_nan=False) + "\n"
    console.show(as_json if args.json else preflight.describe_text(report))
    return EXIT_DONE if report["passed"] else EXIT_PREFLIGHT


if __name__ == "__main__":
    console.run_main(main)
