"""Recorded values of a run, as read by the alarm rules and the screen. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.files import read_json_lines
from lib.rundir import RunDir
from lib.status import State, Status, read_status


@dataclass(frozen=True)
class Facts:
    """Records of one run at one moment."""

    # None before the first step.
    status: Status | None
    # Seconds since 1970.
    now: float
    # Heartbeats of each rank, newest last.
    heartbeats: Mapping[int, Sequence[Mapping[str, Any]]]
    # Rows of metrics.jsonl, in order.
    train: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]

    @property
    def is_running(self) -> bool:
        """Return whether the status is RUNNING; a killed run keeps this status."""
        return self.status is not None and self.status.state is State.RUNNING

    @property
    def beats(self) -> Sequence[Mapping[str, Any]]:
        """Return rank 0's heartbeats."""
        return self.heartbeats.get(0, ())


def read_facts(run: RunDir, now: float) -> Facts:
    """Read the run directory; missing files give empty values."""
    rows = list(read_json_lines(run.metrics)) if run.metrics.exists() else []
    beats = {rank: list(read_json_lines(path)) for rank, path in run.heartbeats().items()}
    return Facts(
        status=read_status(run),
        now=now,
        heartbeats=beats,
        train=[row for row in rows if row["kind"] == "train"],
        evals=[row for row in rows if row["kind"] == "eval"],
    )
