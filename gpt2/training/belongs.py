"""Check that a checkpoint matches the configuration and data of the run that resumes from it."""

from collections.abc import Iterator, Mapping
from typing import Any

from gpt2.config import Config
from gpt2.training.session import Session
from lib.errors import Problem, RunError

# Division of a step's sequences among ranks and micro-batches. A run can resume with another
# division, but its results then differ in the last bits.
_DIVISION = {"train.gpus", "train.batch_size", "train.grad_accumulation"}


def made_for(session: Session) -> dict[str, Any]:
    """Return the fingerprint stored in a checkpoint: configured identity and data digest."""
    # Not session.config: an out-of-memory fallback may have changed the micro-batch there.
    configured = Config.from_values(session.config.values)
    return {"config": configured.identity(), "data": session.dataset.digest}


def require_own(
    session: Session, step: int, recorded: Mapping[str, Any], allow_stale: bool
) -> None:
    """Raise RunError unless ``recorded``, from the checkpoint of ``step``, equals ``made_for`` now.

    With ``allow_stale``, a different division of the batch is only logged.
    """
    saved, current = dict(_leaves(recorded)), dict(_leaves(made_for(session)))
    names = [n for n in sorted(saved | current) if saved.get(n) != current.get(n)]
    if not names:
        return
    listed = ", ".join(f"{name} (was {saved.get(name)}, is {current.get(name)})" for name in names)
    what = f"the checkpoint of step {step} belongs to another run: {listed}"
    divided = {f"config.{name}" for name in _DIVISION}
    if allow_stale and divided.issuperset(names):
        session.records.line("WARN", f"{what}; resumed anyway")
        return
    remedy = f"to start the run again, type: make rerun RUNS={session.label}"
    if divided.issuperset(names):
        remedy = f"to resume anyway, type: make STALE=keep; {remedy}"
    raise RunError(Problem(what, str(session.run.checkpoints), remedy, code="checkpoint.mismatch"))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of each leaf of nested mappings."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{name}.{key}" if name else str(key))
