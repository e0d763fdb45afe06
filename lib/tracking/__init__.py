"""Trackers: external programs that display a run while it trains.

A separate process per tracker follows the run's records; training neither calls a tracker library
nor waits for one. The run directory remains the authoritative record.
"""

from lib.config.registry import Registry

TRACKERS = Registry(
    "tracker",
    parts={
        "tracker_wandb": ("lib.tracking.options", "lib.tracking.wandb_tracker", ""),
        "tracker_trackio": ("lib.tracking.options", "lib.tracking.trackio_tracker", ""),
        "tracker_tensorboard": ("lib.tracking.options", "lib.tracking.tensorboard_tracker", ""),
    },
)
