"""What trackers are told of a run."""

import hashlib
import json
from typing import Any

from gpt2.training.session import Session
from lib.tracking.contract import Facts
from lib.tracking.processes import Trackers


def start_trackers(session: Session) -> Trackers:
    """Mirror the run to the trackers of its configuration; rank 0 does, after the manifest."""
    names = [tracker.name for tracker in session.config.tracking.trackers]
    if not (names and session.group.is_main):
        return Trackers()
    # Not the session itself, which has to be gone before its trackers are.
    records = session.records
    return Trackers.start(
        session.run, names, run_facts(session), lambda text: records.line("WARN", text)
    )


def run_facts(session: Session) -> Facts:
    """Names, and the configuration as trackers show it."""
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
        # Seconds; None where the budget is not one of time.
        "max_time": train.max_time_seconds if session.budget.is_time else None,
        "compile_model": config.machine.compile,
        "git_commit": manifest["code"]["git_sha"],
        "dirty_tree": manifest["code"]["dirty_tree"],
        "data_digest": manifest["data"]["digest"],
    }


def _id(session: Session, manifest: dict[str, Any]) -> str:
    """The same for a run that goes on, another for one that is done again.

    A hash of the run's name and of where and when it first started.
    """
    volatile = manifest["volatile"]
    if session.run.tracker_facts.exists():
        return Facts.read(session.run.tracker_facts).id
    first = [session.run.path.name, volatile["host"], volatile["attempts"][0]["started_at"]]
    return hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]
