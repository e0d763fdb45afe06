"""The sidecar process that mirrors one run to one tracker.

    python -m lib.tracking.mirror RUN_DIRECTORY TRACKER < /dev/null

The process follows the run's files until its standard input becomes readable or is closed, then
sends the run's outcome to the tracker. Started by hand, it sends the records that a tracker has
missed.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lib.binding import bind
from lib.companions import FINISH_SECONDS, told_to_end
from lib.environment.redact import Redacting
from lib.errors import EXIT_FAILED, Problem, RunError
from lib.files import sha256
from lib.rundir import RunDir
from lib.runner import locks
from lib.status import State, read_status
from lib.tracking import TRACKERS
from lib.tracking.contract import Facts, Tracker
from lib.tracking.feed import Feed, Position, final_metrics

_POLL_SECONDS = 0.5
# Training has priority.
_NICENESS = 10


def mirror(run: RunDir, name: str, ended: Callable[[float], bool]) -> None:
    """Send all new records of ``run`` to the tracker ``name`` until ``ended(seconds)`` returns
    true.

    ``ended`` waits up to that many seconds for the end of the run. Errors of the tracker are
    raised.
    """
    with locks.waiting(run.trackers / f"{name}.lock", lambda: False):
        position_path = run.trackers / f"{name}.json"
        position = Position.read(position_path)
        if position.complete:
            return
        facts = Facts.read(run.tracker_facts)
        options = bind(TRACKERS.options(name), facts.symbols)
        tracker: Tracker = TRACKERS.module(name)(options, run)
        tracker.start(facts, resumed=position.rows > 0)
        if position.open:
            position.back_to(tracker.kept(position.iteration), run)
        position.open = True
        _follow(run, tracker, position, position_path, ended)
        status = read_status(run)
        succeeded = status is not None and status.state is State.SUCCESS
        if succeeded:
            tracker.log(final_metrics(run), position.iteration)
        # A run with status RUNNING at this point was killed.
        code = EXIT_FAILED if status is None or status.state is State.RUNNING else status.exit_code
        tracker.finish(code, {"manifest_sha256": sha256(run.manifest)})
        if (durable := tracker.kept(position.iteration)) < position.iteration:
            what = (
                f"{name} has stored only iterations up to {durable} of {position.iteration}; "
                "is its disk full?"
            )
            raise RunError(Problem(what, code="tracker.data-lost"))
        position.complete, position.open = succeeded, False
        position.write(position_path)


def _follow(
    run: RunDir,
    tracker: Tracker,
    position: Position,
    position_path: Path,
    ended: Callable[[float], bool],
) -> None:
    feed, at_end = Feed(run, position), False
    while not at_end:
        at_end = ended(_POLL_SECONDS)
        if at_end:
            # A library that blocks from here on must not keep this process alive.
            signal.alarm(FINISH_SECONDS)
        before = position.rows, position.timed
        for iteration, metrics in feed.new(ended=at_end):
            tracker.log(metrics, iteration)
        if (position.rows, position.timed) != before:
            position.write(position_path)


if __name__ == "__main__":
    os.nice(_NICENESS)
    # Libraries print the server address, and WANDB_BASE_URL may contain a password.
    sys.stdout = Redacting(sys.stdout.buffer, line_buffering=True)
    sys.stderr = Redacting(sys.stderr.buffer, line_buffering=True)
    mirror(RunDir(Path(sys.argv[1])), sys.argv[2], told_to_end)
