"""Whether a checkpoint belongs to the run that would go on from it: configuration and data."""

from collections.abc import Iterator, Mapping
from typing import Any

from gpt2.config import Config
from gpt2.training.session import Session
from lib.errors import Problem, RunError

# How the sequences of a step are dealt out: with another division a run can go on, to other bits.
_DIVISION = {"train.gpus", "train.batch_size", "train.grad_accumulation"}


def made_for(session: Session) -> dict[str, Any]:
    """What a checkpoint says of its run: the identity that was configured, and the data's digest."""
    # Not the session's own, whose batches may have been divided anew to fit the memory.
    configured = Config.from_values(session.config.values)
    return {"config": configured.identity(), "data": session.dataset.digest}


def require_own(
    session: Session, step: int, recorded: Mapping[str, Any], allow_stale: bool
) -> None:
    """RunError unless ``recorded``, of the checkpoint of ``step``, says what ``made_for`` does now.

    With ``allow_stale``, another division of the batch is only said.
    """
    was, now = dict(_leaves(recorded)), dict(_leaves(made_for(session)))
    names = [name for name in sorted(was | now) if was.get(name) != now.get(name)]
    if not names:
        return
    listed = ", ".join(f"{name} (was {was.get(name)}, is {now.get(name)})" for name in names)
    what = f"the checkpoint of step {step} was made for another run: {listed}"
    divided = {f"config.{name}" for name in _DIVISION}
    if allow_stale and divided.issuperset(names):
        session.records.line("WARN", f"{what}; it is resumed all the same")
        return
    remedy = f"type: make rerun RUNS={session.label}, which starts the run anew"
    if divided.issuperset(names):
        remedy = f"to go on all the same: make STALE=keep; or {remedy}"
    raise RunError(Problem(what, str(session.run.checkpoints), remedy))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in nested mappings."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, item in value.items():
        yield from _leaves(item, f"{name}.{key}" if name else str(key))
