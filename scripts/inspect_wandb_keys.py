#!/usr/bin/env python3
"""List the tracked metrics and settings of a run.

inspect_wandb_keys.py --project kablate-ratio --run-name RUN                  from a W&B server
inspect_wandb_keys.py --source local --folder results --run-name RUN          from the run directories
"""

import _start

from lib import console
from lib.tracking.queries import query_keys


def main() -> int:
    """Run the command line."""
    console.show(query_keys(__doc__))
    return 0


if __name__ == "__main__":
    console.run_main(main)
