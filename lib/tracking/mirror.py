"""The process that mirrors one run to one tracker.

    python -m lib.tracking.mirror RUN_DIRECTORY TRACKER < /dev/null

It follows the run's files until there is something to read from its standard input, be it the end,
and then tells the tracker how the run ended. Started by hand, it tells what a tracker has missed.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lib.binding import bind
from lib.companions import FINISH_SECONDS, told_to_end
from lib.environment.redact import Redacting
from lib.errors import EXIT_FAILED, RunError
from lib.files import sha256
from lib.rundir import RunDir
from lib.runner import locks
from lib.status import State, read_status
from lib.tracking import TRACKERS
from lib.tracking.contract import Facts, Tracker
from lib.tracking.feed import Feed, Position, final_metrics

_POLL_SECONDS = 0.5
# Training comes first.
_NICENESS = 10


def mirror(run: RunDir, name: str, ended: Callable[[float], bool]) -> None:
    """Tell the tracker ``name`` what it does not know of ``run``, until ``ended(seconds)`` says so.

    ``ended`` waits that long for the end. Any error of the tracker is raised.
    """
    with locks.waiting(run.trackers / f"{name}.lock", lambda: False):
        at = run.trackers / f"{name}.json"
        position = Position.read(at)
        if position.complete:
            return
        facts = Facts.read(run.tracker_facts)
        options = bind(TRACKERS.options(name), facts.symbols)
        tracker: Tracker = TRACKERS.module(name)(options, run)
        tracker.start(facts, resumed=position.rows > 0)
        if position.open:
            position.back_to(tracker.kept(position.iteration), run)
        position.open = True
        _follow(run, tracker, position, at, ended)
        status = read_status(run)
        done = status is not None and status.state is State.SUCCESS
        if done:
            tracker.log(final_metrics(run), position.iteration)
        # A run that is still RUNNING now was killed.
        code = EXIT_FAILED if status is None or status.state is State.RUNNING else status.exit_code
        tracker.finish(code, {"manifest_sha256": sha256(run.manifest)})
        if (kept := tracker.kept(position.iteration)) < position.iteration:
            said = f"iterations up to {kept} of {position.iteration}"
            what = f"it is sure to have kept only {said}; is its disk full?"
            raise RunError(what)
        position.complete, position.open = done, False
        position.write(at)


def _follow(
    run: RunDir, tracker: Tracker, position: Position, at: Path, ended: Callable[[float], bool]
) -> None:
    feed, at_end = Feed(run, position), False
    while not at_end:
        at_end = ended(_POLL_SECONDS)
        if at_end:
            # Whatever a library waits for now, it cannot keep this process.
            signal.alarm(FINISH_SECONDS)
        before = position.rows, position.timed
        for iteration, metrics in feed.new(ended=at_end):
            tracker.log(metrics, iteration)
        if (position.rows, position.timed) != before:
            position.write(at)


if __name__ == "__main__":
    os.nice(_NICENESS)
    # A library says which server it talks to, and WANDB_BASE_URL may hold a password.
    sys.stdout = Redacting(sys.stdout.buffer, line_buffering=True)
    sys.stderr = Redacting(sys.stderr.buffer, line_buffering=True)
    mirror(RunDir(Path(sys.argv[1])), sys.argv[2], told_to_end)
