#!/usr/bin/env python3
"""Report the GPU utilisation and memory of a run, aggregated over its GPUs.

query_wandb_gpu.py --project kablate-ratio --run-name RUN                  from a W&B server
query_wandb_gpu.py --source local --folder results --run-name RUN          from the run directories
"""

import _start

from lib import console
from lib.tracking.queries import query_gpu_usage


def main() -> int:
    """Run the command line."""
    console.show(query_gpu_usage(__doc__, full=False))
    return 0


if __name__ == "__main__":
    console.run_main(main)
