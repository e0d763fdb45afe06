#!/usr/bin/env python3
"""How well a run used each of its GPUs: utilisation, memory, power and temperature.

query_wandb_gpu_full.py --project kablate-ratio --run-name RUN                  from a W&B server
query_wandb_gpu_full.py --source local --folder results --run-name RUN          from the run directories
"""

import _start

from lib import cli
from lib.queries.gpu import read_gpu, gpu_to_json, gpu_to_text
from lib.queries.arguments import asked_run, query_parser


def main() -> int:
    """The command line."""
    parser = query_parser(__doc__)
    parser.add_argument("--run-name", required=True, help="its name, or its id in the source")
    given = parser.parse_args()
    found = read_gpu(*asked_run(given), full=True)
    print(gpu_to_json(found) if given.json else gpu_to_text(found), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)
