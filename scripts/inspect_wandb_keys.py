#!/usr/bin/env python3
"""List the metrics and settings that a run was tracked with.

inspect_wandb_keys.py --project kablate-ratio --run-name RUN                  from a W&B server
inspect_wandb_keys.py --source local --folder results --run-name RUN          from the run directories
"""

import _start

from lib import cli
from lib.queries.keys import read_keys, keys_to_json, keys_to_text
from lib.queries.arguments import asked_run, query_parser


def main() -> int:
    """The command line."""
    parser = query_parser(__doc__)
    parser.add_argument("--run-name", required=True, help="its name, or its id in the source")
    given = parser.parse_args()
    found = read_keys(*asked_run(given))
    print(keys_to_json(found) if given.json else keys_to_text(found), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
