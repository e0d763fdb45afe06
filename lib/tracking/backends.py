"""The tracker of each class of options. A tracker's library is imported when it is built."""

from collections.abc import Callable
from typing import Any

from lib.runs.run_dir import RunDir
from lib.tracking.options import (
    TrackerOptions,
    TrackerTensorboardOptions,
    TrackerTrackioOptions,
    TrackerWandbOptions,
)
from lib.tracking.tracker import Tracker
from lib.tracking.trackio_tracker import TrackerTrackio


def _wandb(options: TrackerWandbOptions, run: RunDir) -> Tracker:
    from lib.tracking.wandb_tracker import TrackerWandb

    return TrackerWandb(options, run)


def _tensorboard(options: TrackerTensorboardOptions, run: RunDir) -> Tracker:
    from lib.tracking.tensorboard_tracker import TrackerTensorboard

    return TrackerTensorboard(options, run)


MODULES: dict[type[Any], Callable[[Any, RunDir], Tracker]] = {
    TrackerWandbOptions: _wandb,
    TrackerTrackioOptions: TrackerTrackio,
    TrackerTensorboardOptions: _tensorboard,
}


def build_tracker(options: TrackerOptions, run: RunDir) -> Tracker:
    """Return the tracker of a run directory; imports the tracker's package."""
    return MODULES[type(options)](options, run)
