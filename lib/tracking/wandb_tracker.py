"""Weights & Biases tracker, online or offline."""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from lib.errors import Problem, RunError
from lib.runs.run_dir import RunDir
from lib.tracking.options import TrackerWandbOptions
from lib.tracking.tracker import TrackerMetadata, TrackerTable

# Time limit for opening a run; a slower server counts as unreachable.
_INIT_TIMEOUT_SECONDS = 20.0
_BLOCK = 1 << 15
_CHUNK_HEADER = 7
_UNAUTHORIZED = re.compile(r"\b401\b")


class TrackerWandb:
    """Implementation of ``lib.tracking.tracker.Tracker``; writes to ``trackers/wandb``."""

    def __init__(self, options: TrackerWandbOptions, run: RunDir) -> None:
        self._options = options
        self._folder = run.trackers

    def start(self, facts: TrackerMetadata, *, resumed: bool) -> None:
        """Open the run or resume it by its id, on the server or in "wandb sync"."""
        online = self._options.mode == "online"
        self._finished = False
        settings = wandb.Settings(
            console="off",
            # The configuration records the commit; a remote's URL may contain a password.
            disable_git=True,
            init_timeout=_INIT_TIMEOUT_SECONDS,
        )
        try:
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
        except wandb.errors.Error as error:
            if _UNAUTHORIZED.search(str(error)) is None:
                raise
            what = "the W&B server rejected the API key (401)"
            advice = "set WANDB_API_KEY, or type: wandb login"
            raise RunError(Problem(what, next=advice, code="tracker.unauthorized")) from error

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Log metrics at an iteration."""
        self._run.log(dict(metrics), step=iteration)

    def table(self, name: str, table: TrackerTable, iteration: int) -> None:
        """Log a table, and its second column in the summary of the run."""
        data = [list(row) for row in table.rows]
        media = wandb.Table(columns=[*table.header], data=data, allow_mixed_types=True)
        self._run.log({name: media}, step=iteration)
        self._run.summary.update({f"{name}/{row[0]}": row[1] for row in table.rows})

    def kept(self, told: int) -> int:
        """Return the iterations already on the server when the run was opened; ``told`` at the end.

        Offline, each start writes a separate file, which must be complete at the end: W&B ignores
        failed writes.
        """
        if self._options.mode == "online":
            return told if self._finished else self._run.starting_step - 1
        if not self._finished:
            return 0
        # W&B's service process writes the last records only when it ends.
        wandb.teardown()
        files = [*Path(self._run.sync_dir).glob("*.wandb")]
        return told if files and all(map(is_complete_log, files)) else 0

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Send all remaining data, or close the file."""
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.finish(exit_code=exit_code)
        self._finished = True


def is_complete_log(file: Path) -> bool:
    """Return whether the last record of W&B's offline file is complete.

    The file is a LevelDB log: blocks of 32 KiB with chunks of checksum, length, type (1 a full
    record, 4 the last part of a record) and content; the first block starts with seven bytes of
    W&B's own header. A full disk truncates the file at any byte.
    """
    size = file.stat().st_size
    start = max(0, size - 1) // _BLOCK * _BLOCK
    with open(file, "rb") as stream:
        stream.seek(start)
        block = stream.read()
    at, kind = (0 if start else _CHUNK_HEADER), 0
    while at + _CHUNK_HEADER <= len(block):
        length, kind = struct.unpack_from("<HB", block, at + 4)
        at += _CHUNK_HEADER + length
    return at == len(block) and kind in (1, 4)
