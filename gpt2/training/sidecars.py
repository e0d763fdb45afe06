"""Sidecar processes of a run, and its description for trackers."""

import hashlib
import json

from gpt2.training.state import TrainingSession
from lib.runs.record import RunRecord
from lib.tracking.sidecar import Sidecars
from lib.tracking.trackers import TrackerMetadata


def start_sidecars(session: TrainingSession) -> Sidecars:
    """Start the hardware sampler and the tracker mirrors on rank 0; the manifest must exist."""
    if not session.group.is_main:
        return Sidecars()
    # Without a reference to the session, because it must be freed before its sidecars are.
    records, run = session.records, session.run
    sidecars = Sidecars(lambda text: records.line("WARN", text))
    if seconds := session.config.telemetry.interval_seconds:
        sidecars.start_telemetry(run, seconds)
    try:
        run.trackers.mkdir(exist_ok=True)
        tracker_metadata(session).write(run.tracker_facts)
    except OSError as error:
        what = f"no tracker could be started: {error}; the run continues without trackers"
        records.line("WARN", what)
        return sidecars
    for tracker in session.config.tracking.trackers:
        sidecars.start_mirror(run, tracker.name)
    return sidecars


def tracker_metadata(session: TrainingSession) -> TrackerMetadata:
    """Return names and configuration of the run; its id hashes name and time of the first start."""
    config, run = session.config, session.run
    train, record = config.train, RunRecord(run)
    name, study = run.path.name, run.path.parent.name
    first_start = json.dumps([name, record.attempts[0].started_at])
    return TrackerMetadata(
        id=hashlib.sha256(first_start.encode()).hexdigest()[:16],
        project=config.tracking.project or f"kablate-{study}",
        name=config.tracking.run_name or name,
        study=study,
        # <slug>-s<seed>-<hash8>
        step=name.rsplit("-", 2)[0],
        settings={
            "run_name": name,
            "hash8": config.hash8,
            "seed": config.seed,
            "dataset": config.data.dataset,
            "optimizer": config.optimizer.name,
            "batch_size": train.batch_size,
            "gradient_accumulation": train.grad_accumulation,
            "num_gpus": train.gpus,
            "learning_rate": config.schedule.learning_rate,
            "warmup_steps": config.schedule.warmup_steps,
            # Seconds; None unless the budget is time.
            "max_time": train.max_time_seconds if session.budget.is_time else None,
            "compile_model": config.machine.compile,
            "git_commit": record.code.git_sha,
            "dirty_tree": record.code.dirty_tree,
            "data_digest": record.manifest.value(str, "data", "digest"),
        },
        symbols=config.values,
    )
