"""Trackers: programs that show a run to people while it trains. The run's directory is the truth.

Each is fed by a process of its own, which follows the run's records; training neither calls a
tracker's library nor waits for it.
"""

from lib.registry import Registry

TRACKERS = Registry(
    "tracker",
    parts={
        "tracker_wandb": "lib.tracking.tracker_wandb",
        "tracker_trackio": "lib.tracking.tracker_trackio",
        "tracker_tensorboard": "lib.tracking.tracker_tensorboard",
    },
)
