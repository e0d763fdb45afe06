"""The trackers of a run: the facts that they receive, and the calls of each tracker's library.

A tracker is built in a process of its own, which an error ends, and imports its library then:

- ``start(facts, resumed=)`` opens the run; ``resumed`` if the tracker has received a part of it.
- ``log(metrics, iteration)``: iterations never decrease, and may be repeated.
- ``finish(exit_code, settings)`` flushes all data and closes the run.
- ``stored(sent)`` returns the newest iteration up to which all data is durable, of those logged; it is
  called at the end, and after a process died: libraries queue data, and some drop it silently.
"""

import itertools
import json
import os
import re
import sqlite3
import subprocess
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lib.config.field import SymbolValue
from lib.errors import Problem, RunError
from lib.files import write_json
from lib.json_files import read_json_object
from lib.project import python_module_command
from lib.runs.record import JsonRecord
from lib.runs.run_dir import RunDir
from lib.tracking.options import (
    TrackerTensorboardOptions,
    TrackerTrackioOptions,
    TrackerWandbOptions,
)

SCHEMA_VERSION = 1
# Time limit for opening a run; a slower server counts as unreachable.
_INIT_TIMEOUT_SECONDS = 20.0
_UNAUTHORIZED = re.compile(r"\b401\b")


@dataclass(frozen=True)
class TrackerMetadata:
    """Facts of a run that a tracker receives before the first metric."""

    # Unchanged when the run is resumed.
    id: str
    project: str
    name: str
    study: str
    step: str
    # Entries of the displayed configuration, under the names that query scripts use.
    settings: Mapping[str, Any]
    # Every Kconfig symbol's value.
    symbols: Mapping[str, SymbolValue]

    @property
    def config(self) -> dict[str, Any]:
        """Return symbols and settings, whose names are upper and lower case, as one flat dict."""
        return {**self.symbols, **self.settings, "study": self.study, "step": self.step}

    def write(self, path: Path) -> None:
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Self:
        return JsonRecord(path, read_json_object(path)).section(cls)


class TrackerWandb:
    """Weights & Biases, online or in ``trackers/wandb``."""

    def __init__(self, options: TrackerWandbOptions, run: RunDir) -> None:
        # The service of another process would keep the run of a mirror that was killed.
        os.environ.pop("WANDB_SERVICE", None)
        import wandb

        self._wandb = wandb
        self._options = options
        self._folder = run.trackers
        self._finished = False

    def start(self, facts: TrackerMetadata, *, resumed: bool) -> None:
        """Open the run or resume it by its id, on the server or in "wandb sync"."""
        online = self._options.mode == "online"
        # The configuration records the commit; a remote's URL may contain a password.
        privacy = {"console": "off", "disable_git": True}
        settings = self._wandb.Settings(init_timeout=_INIT_TIMEOUT_SECONDS, **privacy)
        try:
            self._run = self._wandb.init(
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
        except self._wandb.errors.Error as error:
            if _UNAUTHORIZED.search(str(error)) is None:
                raise
            what = "the W&B server rejected the API key (401)"
            advice = "set WANDB_API_KEY, or type: wandb login"
            raise RunError(Problem(what, next=advice, code="tracker.unauthorized")) from error

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        self._run.log(dict(metrics), step=iteration)

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.finish(exit_code=exit_code)
        self._finished = True

    def stored(self, sent: int) -> int:
        """Return the iterations on the server at the start; at the end ``sent``, if they are in its file."""
        if self._options.mode == "online":
            return sent if self._finished else self._run.starting_step - 1
        if not self._finished:
            return 0
        # W&B's service process writes the last records only when it ends.
        self._wandb.teardown()
        return sent if has_end(self._run.sync_dir) else 0


def has_end(folder: str) -> bool:
    """Return whether W&B's reader finds the end of the offline run in ``folder``."""
    command = ("wandb", "leet", "inspect", "--summary", "--json", folder)
    inspected = subprocess.run(python_module_command(*command), capture_output=True)
    return not inspected.returncode and json.loads(inspected.stdout)["exit_code"] is not None


class TrackerTrackio:
    """trackio, which has one SQLite database per project; a study has one."""

    def __init__(self, options: TrackerTrackioOptions, run: RunDir) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.path.parent / "trackio"))
        # trackio reads the variable on import.
        import trackio

        self._trackio = trackio
        self._iteration = 0

    def start(self, facts: TrackerMetadata, *, resumed: bool) -> None:
        """Open a new run, or resume the newest run of this name."""
        self._store = self._trackio.SQLiteStorage.get_project_db_path(facts.project)
        self._run = self._trackio.init(
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
        self._iteration = iteration
        self._run.log(dict(metrics), step=iteration)

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Flush all data; ``settings`` become a last row, because trackio's configuration is fixed."""
        self._run.log(dict(settings), step=self._iteration)
        self._run.finish()

    def stored(self, sent: int) -> int:
        """Return the last iteration before a gap in the database; trackio ignores failed writes."""
        query, steps = "SELECT DISTINCT step FROM metrics WHERE run_id = ?", set[int]()
        # The table does not exist if nothing was written.
        with closing(sqlite3.connect(self._store)) as store, suppress(sqlite3.OperationalError):
            steps = {step for (step,) in store.execute(query, (self._run.id,))}
        return next(i for i in itertools.count() if i + 1 not in steps)


class TrackerTensorboard:
    """TensorBoard's event files in ``trackers/tensorboard``, by tensorboard's writer: torch's is slow."""

    def __init__(self, options: TrackerTensorboardOptions, run: RunDir) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # A new file, which TensorBoard appends to earlier ones.
        self._writer = EventFileWriter(str(run.trackers / "tensorboard"))

    def start(self, facts: TrackerMetadata, *, resumed: bool) -> None:
        if not resumed:
            self._text("config", {**facts.config, "project": facts.project, "id": facts.id})

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._write(Summary(value=values), iteration)

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        self._text("end", {**settings, "exit_code": exit_code})
        self._writer.close()

    def stored(self, sent: int) -> int:
        """Return ``sent``: every event is flushed, and a failed write raises at once."""
        return sent

    def _text(self, tag: str, facts: Mapping[str, Any]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        # Indent by four spaces so that Markdown shows the text as a code block.
        lines = json.dumps(facts, indent=4, sort_keys=True).splitlines()
        self._write(text_pb(tag, "\n".join(f"    {line}" for line in lines)), 0)

    def _write(self, summary: Any, iteration: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=iteration, summary=summary))
        # Events counted as sent must be in the file even if this process is killed.
        self._writer.flush()


MODULES: dict[type[Any], type[Any]] = {
    TrackerWandbOptions: TrackerWandb,
    TrackerTrackioOptions: TrackerTrackio,
    TrackerTensorboardOptions: TrackerTensorboard,
}
