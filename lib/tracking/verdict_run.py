"""The run "verdicts" of a study in its trackers: a table, sent again when a verdict has changed.

    python -m lib.tracking.verdict_run STUDY/verdicts TRACKER < /dev/null

A verdict concerns several runs, all of which have ended before it exists, so none of their tracker
runs can contain it.
"""

import hashlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from lib.config.field import SymbolValue, from_symbols
from lib.config.private import without_private
from lib.errors import Problem, RunError
from lib.files import canonical_json, file_lock, sha256_file, write_json
from lib.json_files import RecordError, read_json_object
from lib.runs.record import JsonRecord
from lib.runs.run_dir import RunDir
from lib.tracking.backends import build_tracker
from lib.tracking.config import TrackingConfig
from lib.tracking.options import TRACKERS
from lib.tracking.sidecar import (
    FINISH_TIMEOUT_SECONDS,
    SidecarCommand,
    Sidecars,
    become_sidecar,
)
from lib.tracking.tracker import TrackerMetadata, TrackerTable

VERDICTS_RUN = "verdicts"
_MODULE = "lib.tracking.verdict_run"
_SCHEMA_VERSION = 1
_ID_DIGITS = 16


def send_verdicts(
    study: Path,
    tracking: TrackingConfig,
    symbols: Mapping[str, SymbolValue],
    table: TrackerTable,
    warn: Callable[[str], None],
) -> None:
    """Send the table of the verdicts to every tracker that does not have it.

    A failure is reported to ``warn``, and the table is sent with the next report.
    """
    if not table.rows or not tracking.trackers:
        return
    run = RunDir(study / VERDICTS_RUN)
    try:
        run.trackers.mkdir(parents=True, exist_ok=True)
        write_json(_table(run), {"schema_version": _SCHEMA_VERSION, **asdict(table)})
        digest = sha256_file(_table(run))
        waiting = [t.name for t in tracking.trackers if _sent(run, t.name)[1] != digest]
        if waiting:
            _metadata(run, tracking, symbols).write(run.tracker_facts)
        with Sidecars(warn) as sidecars:
            for name in waiting:
                sidecars.start(
                    SidecarCommand(
                        name,
                        [_MODULE, str(run.path), name],
                        run.tracker_log(name),
                        "it lacks the verdicts; to send them, type: make verdicts",
                    )
                )
    except (OSError, RecordError) as error:
        warn(f"the trackers lack the verdicts: {error}; move {run.path} aside")


def _metadata(
    run: RunDir, tracking: TrackingConfig, symbols: Mapping[str, SymbolValue]
) -> TrackerMetadata:
    """Return the metadata; the id stays that of the first table."""
    study = run.path.parent.name
    if run.tracker_facts.exists():
        run_id = TrackerMetadata.read(run.tracker_facts).id
    else:
        first = canonical_json([str(run.path.absolute()), time.time()])
        run_id = hashlib.sha256(first.encode()).hexdigest()[:_ID_DIGITS]
    project = tracking.project or f"kablate-{study}"
    return TrackerMetadata(run_id, project, VERDICTS_RUN, study, "", {}, without_private(symbols))


def _table(run: RunDir) -> Path:
    return run.trackers / "table.json"


def _sent(run: RunDir, name: str) -> tuple[int, str]:
    """Return how many tables the tracker has received, and the digest of the last one."""
    path = run.trackers / f"{name}.json"
    if not path.exists():
        return 0, ""
    record = JsonRecord(path, read_json_object(path))
    return record.value(int, "sent"), record.value(str, "sha256")


def send_table(run: RunDir, name: str) -> None:
    """Send the table of ``run`` to the tracker ``name``. Errors of the tracker are raised."""
    with file_lock(run.trackers / f"{name}.lock"):
        count = _sent(run, name)[0] + 1
        table = JsonRecord(_table(run), read_json_object(_table(run))).section(TrackerTable)
        digest = sha256_file(_table(run))
        facts = TrackerMetadata.read(run.tracker_facts)
        options = from_symbols(TRACKERS.options(name), facts.symbols)
        # Files of the table before this one, which a dashboard or "wandb sync" would add to it.
        files = run.trackers / options.package
        replaced = files.exists()
        shutil.rmtree(files, ignore_errors=True)
        tracker = build_tracker(options, run)
        tracker.start(facts, resumed=count > 1 and not replaced)
        tracker.table(VERDICTS_RUN, table, count)
        tracker.finish(0, {"table_sha256": digest})
        if tracker.kept(count) < count:
            what = f"{name} has not stored the verdicts; is its disk full?"
            raise RunError(Problem(what, code="tracker.data-lost"))
        sent = {"schema_version": _SCHEMA_VERSION, "sent": count, "sha256": digest}
        write_json(run.trackers / f"{name}.json", sent)


if __name__ == "__main__":
    become_sidecar()
    # A library that blocks must not keep this process alive.
    signal.alarm(FINISH_TIMEOUT_SECONDS)
    send_table(RunDir(Path(sys.argv[1])), sys.argv[2])
