"""trackio: a SQLite database for each project."""

import itertools
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from lib.rundir import RunDir
from lib.tracking.contract import Facts
from lib.tracking.tracker_trackio.options import TrackerTrackioOptions


class TrackerTrackio:
    """Keeps ``lib.tracking.contract.Tracker``; the database is that of the study."""

    def __init__(self, options: TrackerTrackioOptions, run: RunDir) -> None:
        self._folder = run.path.parent / "trackio"
        self._iteration = 0

    def start(self, facts: Facts, *, resumed: bool) -> None:
        """Open the run, or go on with the newest one of its name."""
        os.environ.setdefault("TRACKIO_DIR", str(self._folder))
        # Reads the variable when it is imported.
        import trackio

        self._store = trackio.SQLiteStorage.get_project_db_path(facts.project)
        self._run = trackio.init(
            project=facts.project,
            name=facts.name,
            group=facts.study,
            config=facts.config,
            resume="allow" if resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Show metrics at an iteration."""
        self._iteration = iteration
        self._run.log(dict(metrics), step=iteration)

    def kept(self, told: int) -> int:
        """As many as stand in the database without a gap: trackio goes on where it cannot write."""
        query = "SELECT DISTINCT step FROM metrics WHERE run_id = ?"
        try:
            with closing(sqlite3.connect(self._store)) as store:
                steps = {step for (step,) in store.execute(query, (self._run.id,))}
        except sqlite3.OperationalError:
            # No table was ever written.
            steps = set()
        return next(i for i in itertools.count() if i + 1 not in steps)

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Write what is left; a configuration cannot be added to, so ``settings`` are a last row."""
        self._run.log(dict(settings), step=self._iteration)
        self._run.finish()
