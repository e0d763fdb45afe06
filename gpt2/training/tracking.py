"""Sidecar processes of a run, and the run metadata for trackers."""

import hashlib
import json
from typing import Any

from gpt2.training.session import Session
from lib.tracking.contract import Facts
from lib.companions import Companions
from lib.telemetry.job import sampler_job
from lib.tracking.jobs import mirror_job


def start_companions(session: Session) -> Companions:
    """Start the hardware sampler and the tracker mirrors on rank 0; the manifest must exist."""
    if not session.group.is_main:
        return Companions()
    # Without a reference to the session, because it must be freed before its sidecars are.
    records, run = session.records, session.run
    companions = Companions(lambda text: records.line("WARN", text))
    if seconds := session.config.telemetry.interval_seconds:
        companions.start(sampler_job(run, seconds))
    try:
        run.trackers.mkdir(exist_ok=True)
        run_facts(session).write(run.tracker_facts)
    except OSError as error:
        records.line(
            "WARN", f"no tracker could be started: {error}; the run continues without trackers"
        )
        return companions
    for tracker in session.config.tracking.trackers:
        companions.start(mirror_job(run, tracker.name))
    return companions


def run_facts(session: Session) -> Facts:
    """Return the names and the configuration of the run for trackers."""
    run, tracking = session.run, session.config.tracking
    study = run.path.parent.name
    manifest = json.loads(run.manifest.read_text())
    return Facts(
        id=_id(session, manifest),
        project=tracking.project or f"kablate-{study}",
        name=tracking.run_name or run.path.name,
        study=study,
        # <slug>-s<seed>-<hash8>
        step=run.path.name.rsplit("-", 2)[0],
        settings=_settings(session, manifest),
        symbols=session.config.values,
    )


def _settings(session: Session, manifest: dict[str, Any]) -> dict[str, Any]:
    config, train = session.config, session.config.train
    return {
        "run_name": session.run.path.name,
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
        "git_commit": manifest["code"]["git_sha"],
        "dirty_tree": manifest["code"]["dirty_tree"],
        "data_digest": manifest["data"]["digest"],
    }


def _id(session: Session, manifest: dict[str, Any]) -> str:
    """Return the tracker id: stable when a run resumes, new when a run is repeated.

    The id is a hash of the run's name and of host and time of its first start.
    """
    volatile = manifest["volatile"]
    if session.run.tracker_facts.exists():
        return Facts.read(session.run.tracker_facts).id
    first_start = [session.run.path.name, volatile["host"], volatile["attempts"][0]["started_at"]]
    return hashlib.sha256(json.dumps(first_start).encode()).hexdigest()[:16]
