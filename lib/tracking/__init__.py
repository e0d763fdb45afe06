"""Trackers: external programs that display a run while it trains.

A separate process per tracker follows the run's records; training neither calls a tracker library
nor waits for one. The run directory remains the authoritative record.
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
