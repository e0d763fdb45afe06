"""Weights & Biases, online or offline."""

from collections.abc import Mapping
from typing import Any

import wandb

from lib.rundir import RunDir
from lib.tracking.contract import Facts
from lib.tracking.tracker_wandb.options import TrackerWandbOptions

# A server that has not answered by then is away.
_INIT_SECONDS = 20.0


class TrackerWandb:
    """Keeps ``lib.tracking.contract.Tracker``; its files lie in ``trackers/wandb``."""

    def __init__(self, options: TrackerWandbOptions, run: RunDir) -> None:
        self._options = options
        self._folder = run.trackers

    def start(self, facts: Facts, *, resumed: bool) -> None:
        """Open the run, or go on with it: the server, or "wandb sync", knows it by its id."""
        online = self._options.mode == "online"
        settings = wandb.Settings(
            console="off",
            # The configuration has the commit; an address of a remote may hold a password.
            disable_git=True,
            init_timeout=_INIT_SECONDS,
        )
        self._run = wandb.init(
            mode="online" if online else "offline",
            entity=self._options.entity or None,
            project=facts.project,
            name=facts.name,
            group=facts.study,
            id=facts.id,
            resume="allow" if online else None,
            config=facts.config,
            dir=self._folder,
            save_code=False,
            settings=settings,
        )

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Show metrics at an iteration."""
        self._run.log(dict(metrics), step=iteration)

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Send what is left, or close the file."""
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.finish(exit_code=exit_code)
