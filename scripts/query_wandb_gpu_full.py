#!/usr/bin/env python3
"""Report utilisation, memory, power and temperature of each GPU of a run.

query_wandb_gpu_full.py --project kablate-ratio --run-name RUN                  from a W&B server
query_wandb_gpu_full.py --source local --folder results --run-name RUN          from the run directories
"""

import _start

from lib import console
from lib.tracking.queries import (
    gpu_to_json,
    gpu_to_text,
    query_parser,
    read_gpu_utilisation,
    run_from_args,
)


def main() -> int:
    """Run the command line."""
    parser = query_parser(__doc__)
    parser.add_argument("--run-name", required=True, help="name or tracker id of the run")
    args = parser.parse_args()
    usage = read_gpu_utilisation(*run_from_args(args), full=True)
    print(gpu_to_json(usage) if args.json else gpu_to_text(usage), end="")
    return 0


if __name__ == "__main__":
    console.run_main(main)
