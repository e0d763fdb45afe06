"""The sidecar process that mirrors one run to one tracker.

    python -m lib.tracking.mirror RUN_DIRECTORY TRACKER < /dev/null

The process follows the run's files until its standard input becomes readable or is closed, then
sends the run's outcome to the tracker. Started by hand, it sends the records that a tracker has
missed.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lib.config.field import from_symbols
from lib.errors import EXIT_FAILED, Problem, RunError
from lib.files import file_lock, sha256_file
from lib.runs.run_dir import RunDir, State, read_status
from lib.tracking.options import TRACKERS
from lib.tracking.reader import ReadCursor, RecordReader, best_validation_metrics, succeeded
from lib.tracking.sidecar import FINISH_TIMEOUT_SECONDS, become_sidecar, should_exit
from lib.tracking.trackers import MODULES, TrackerMetadata

_POLL_SECONDS = 0.5


def mirror(run: RunDir, name: str, ended: Callable[[float], bool]) -> None:
    """Send the records of ``run`` to the tracker ``name`` until ``ended(seconds)``; raise its errors."""
    with file_lock(run.trackers / f"{name}.lock"):
        position_path = run.trackers / f"{name}.json"
        position = ReadCursor.read(position_path)
        if position.complete:
            return
        facts, options = TrackerMetadata.read(run.tracker_facts), TRACKERS.options(name)
        tracker = MODULES[options](from_symbols(options, facts.symbols), run)
        tracker.start(facts, resumed=position.rows > 0)
        if position.open:
            position.back_to(tracker.stored(position.iteration), run)
        position.open = True
        reader, at_end = RecordReader(run, position), False
        while not at_end:
            at_end = ended(_POLL_SECONDS)
            if at_end:
                # A library that blocks from here on must not keep this process alive.
                signal.alarm(FINISH_TIMEOUT_SECONDS)
            before = position.rows, position.timed
            for iteration, metrics in reader.new(ended=at_end):
                tracker.log(metrics, iteration)
            if (position.rows, position.timed) != before:
                position.write(position_path)
        if succeeded(run):
            tracker.log(best_validation_metrics(run), position.iteration)
        status = read_status(run)
        # A run with status RUNNING at this point was killed.
        code = EXIT_FAILED if status is None or status.state is State.RUNNING else status.exit_code
        tracker.finish(code, {"manifest_sha256": sha256_file(run.manifest)})
        if (durable := tracker.stored(position.iteration)) < position.iteration:
            what = f"{name} has stored only iterations up to {durable} of {position.iteration}"
            what += "; is its disk full?"
            raise RunError(Problem(what, code="tracker.data-lost"))
        position.complete, position.open = succeeded(run), False
        position.write(position_path)


if __name__ == "__main__":
    become_sidecar()
    mirror(RunDir(Path(sys.argv[1])), sys.argv[2], should_exit)
