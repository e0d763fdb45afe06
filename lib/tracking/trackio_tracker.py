"""trackio tracker, writing one SQLite database per project."""

import itertools
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from lib.runs.run_dir import RunDir
from lib.tracking.options import TrackerTrackioOptions
from lib.tracking.tracker import TrackerMetadata, TrackerTable


class TrackerTrackio:
    """Implementation of ``lib.tracking.tracker.Tracker``; a study has one database."""

    def __init__(self, options: TrackerTrackioOptions, run: RunDir) -> None:
        self._folder = run.path.parent / "trackio"
        self._iteration = 0

    def start(self, facts: TrackerMetadata, *, resumed: bool) -> None:
        """Open a new run, or resume the newest run of this name."""
        os.environ.setdefault("TRACKIO_DIR", str(self._folder))
        # trackio reads the variable on import.
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
        """Log metrics at an iteration."""
        self._iteration = iteration
        self._run.log(dict(metrics), step=iteration)

    def table(self, name: str, table: TrackerTable, iteration: int) -> None:
        """Log a table."""
        from trackio import Table

        self._iteration = iteration
        media = Table(columns=list(table.header), data=[list(row) for row in table.rows])
        self._run.log({name: media}, step=iteration)

    def kept(self, told: int) -> int:
        """Return the last iteration before a gap in the database; trackio ignores failed writes."""
        query = "SELECT DISTINCT step FROM metrics WHERE run_id = ?"
        try:
            with closing(sqlite3.connect(self._store)) as store:
                steps = {step for (step,) in store.execute(query, (self._run.id,))}
        except sqlite3.OperationalError:
            # The table does not exist if nothing was written.
            steps = set()
        return next(i for i in itertools.count() if i + 1 not in steps)

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Flush all data; ``settings`` become a last row, because trackio's configuration is fixed."""
        self._run.log(dict(settings), step=self._iteration)
        self._run.finish()
