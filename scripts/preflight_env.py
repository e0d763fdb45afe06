#!/usr/bin/env python3
"""Say whether this machine, in this environment, may train the runs of .config.

    preflight_env.py              a line for each fact and each condition
    preflight_env.py --json       the same as one JSON document

Looks at what every training command looks at before it starts, all of it at once, and writes the
snapshot of the environment (the folder environment, beside .config). Trains and downloads nothing.
Exit codes: 0 all conditions hold, 2 configuration, 3 one does not.
"""

import json
import os

import _start

from gpt2.arguments import add_dirty, add_json, add_selection, asked_plan, new_parser
from lib import cli
from lib.errors import EXIT_DONE, EXIT_PREFLIGHT
from lib.machine.setup import environment


def main() -> int:
    """The command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_dirty(parser)
    add_json(parser)
    given = parser.parse_args()
    _, plan = asked_plan(given)
    # As a run would have them: libraries read these when they are loaded.
    os.environ.update(environment(plan.base.machine))
    from gpt2 import preflight

    place = preflight.TrainingPlace(plan.build_dir, plan.folder, given.dirty)
    told = preflight.describe([run.config for run in plan.runs], place)
    as_json = json.dumps(told, sort_keys=True, allow_nan=False) + "\n"
    print(as_json if given.json else preflight.describe_text(told), end="")
    return EXIT_DONE if told["passed"] else EXIT_PREFLIGHT


if __name__ == "__main__":
    cli.run(main)
