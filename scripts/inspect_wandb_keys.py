#!/usr/bin/env python3
"""List the tracked metrics and settings of a run.

inspect_wandb_keys.py --project kablate-ratio --run-name RUN                  from a W&B server
inspect_wandb_keys.py --source local --folder results --run-name RUN          from the run directories
"""

import _start

from lib import console
from lib.tracking.queries import keys_to_json, keys_to_text, query_parser, read_keys, run_from_args


def main() -> int:
    """Run the command line."""
    parser = query_parser(__doc__)
    parser.add_argument("--run-name", required=True, help="name or tracker id of the run")
    args = parser.parse_args()
    keys = read_keys(*run_from_args(args))
    console.show(keys_to_json(keys) if args.json else keys_to_text(keys))
    return 0


if __name__ == "__main__":
    console.run_main(main)
