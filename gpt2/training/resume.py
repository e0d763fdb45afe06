"""State of an earlier process or run that a training continues from: checkpoints, and INIT_FROM."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpt2.config import DIVISION
from gpt2.records.files import read_resolved_config
from gpt2.training.state import TrainingSession, TrainState
from gpt2.weights.source import run_of, weights_folder
from lib.errors import Problem, RunError
from lib.runs.checkpoint import (
    Checkpoint,
    load_latest_checkpoint,
    read_checkpoint,
    set_checkpoint_aside,
)
from lib.runs.code import drift
from lib.runs.identity import flatten_identity
from lib.units import first_of

# Errors of state whose digests match, but whose content is not of this run's model and optimizer.
_WRONG_CONTENT = (
    *(AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError),
)


def run_fingerprint(session: TrainingSession) -> dict[str, Any]:
    """Return the run that a checkpoint is made for: configured identity and data digest."""
    return {"config": session.configured.identity(), "data": session.dataset.digest}


def resume(session: TrainingSession, allow_stale: bool = False) -> None:
    """Resume from the newest intact checkpoint that fits the records, or start over without one.

    Raises RunError if one fits no records, another run or, unless ``allow_stale``, this code.
    """
    records, folder = session.records, session.run.checkpoints
    warn = partial(records.line, "WARN")
    # The main rank reads first, because reading moves damaged checkpoints aside.
    with session.group.main_first():
        loaded = load_latest_checkpoint(folder, warn, partial(_records_mismatch, session))
    if loaded is None:
        records.rewind({})
        # This process or one before it may have renamed the last checkpoint.
        if any(folder.glob("damaged-*")):
            warn("no intact checkpoint is left: starts over")
        return
    try:
        _restore(session, loaded, allow_stale)
    except _WRONG_CONTENT as error:
        # The session may be restored in part, so only a new process can take an earlier checkpoint.
        if session.group.is_main:
            set_checkpoint_aside(session.run.checkpoint(loaded.step))
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        what = f"checkpoint of step {loaded.step} cannot be restored ({text})"
        advice = "renamed to damaged-*; type: make, to continue from the checkpoint before"
        problem = Problem(what, str(folder), advice, code="checkpoint.damaged")
        raise RunError(problem) from error
    session.saved_at = session.iteration
    text, train = f"resumes at iteration {session.iteration:,}", session.config.train
    if count := len(session.oom_fallbacks):
        text += f", after {count} out-of-memory fallback(s): BATCH_SIZE={train.batch_size} "
        text += f"GRAD_ACCUMULATION={train.grad_accumulation}"
    records.line("TRAIN", text)


def _records_mismatch(session: TrainingSession, loaded: Checkpoint) -> Problem | None:
    """Return the problem if a record differs from its content at the checkpoint."""
    try:
        return session.records.mismatch(loaded.state["records"])
    except _WRONG_CONTENT as error:
        what = f"checkpoint of step {loaded.step} has no sizes of the records ({error!r:.120})"
        remedy = f"type: make rerun RUNS={session.run.path.name}"
        return Problem(what, str(session.run.checkpoints), remedy, code="checkpoint.damaged")


def _restore(session: TrainingSession, loaded: Checkpoint, allow_stale: bool) -> None:
    """Load a checkpoint into the session. Raises RunError if it was made for something else."""
    state, step = loaded.state["session"], loaded.step
    remedy = f"to start the run again, type: make rerun RUNS={session.run.path.name}"
    place = str(session.run.checkpoints)
    saved, current = map(flatten_identity, (loaded.state["made_for"], run_fingerprint(session)))
    names = [n for n in sorted(saved | current) if saved.get(n) != current.get(n)]
    listed = ", ".join(f"{name} (was {saved.get(name)}, is {current.get(name)})" for name in names)
    if not DIVISION.issuperset(name.removeprefix("config.") for name in names):
        what = f"the checkpoint of step {step} belongs to another run: {listed}"
        raise RunError(Problem(what, place, remedy, code="checkpoint.mismatch"))
    if names:
        session.records.line("WARN", f"another division from step {step} on: {listed}")
        state = _divided_anew(loaded)
    if changes := drift(loaded.state["origin"], session.origin):
        what = f"the checkpoint of step {step} was made by other code: {first_of(changes, 5)}"
        if not allow_stale:
            raise RunError(Problem(what, place, remedy, code="checkpoint.other-code"))
        session.records.line("WARN", f"{what}; resumed anyway")
    session.records.rewind(loaded.state["records"])
    session.load_weights(loaded.weights)
    session.load_state_dict(state)


def _divided_anew(loaded: Checkpoint) -> dict[str, Any]:
    """Return the state of a session, with division and fallbacks of the checkpoint as earlier ones."""
    state, config = loaded.state["session"], loaded.state["made_for"]["config"]
    earlier: dict[str, Any] = {"iterations": loaded.step, "oom_fallbacks": state["oom_fallbacks"]}
    for area, name in (path.split(".") for path in sorted(DIVISION)):
        # A setting at its off-value is not part of the identity.
        if name in config[area]:
            earlier[name] = config[area][name]
    divisions = [*state["earlier_divisions"], earlier]
    return {**state, "oom_fallbacks": [], "earlier_divisions": divisions}


def continue_optimizer(
    state: TrainState, build_dir: Path, line: Callable[[str, str], None]
) -> None:
    """Give the optimizer its state in the checkpoint of ``INIT_FROM``, unless it is another one."""
    folder = weights_folder(state.config, build_dir)
    theirs = read_resolved_config(run_of(folder)).optimizer.name
    current = state.config.optimizer.name
    if theirs != current:
        line("INIT", f"new optimizer state: the run has {theirs}, this one {current}")
        return
    anew = state.optimizer.state_dict()
    names = _parameter_names(anew)
    try:
        saved = read_checkpoint(folder).state["session"]["optimizer"]
        index_of = {name: index for index, name in _parameter_names(saved).items()}
        moments = {
            index: saved["state"][index_of[name]]
            for index, name in names.items()
            if index_of.get(name) in saved["state"]
        }
        state.load_optimizer({**anew, "state": moments})
    except _WRONG_CONTENT as error:
        what = f"no state of {current} ({type(error).__name__})"
        raise RunError(Problem(what, str(folder), code="checkpoint.damaged")) from error
    new = len(names) - len(moments)
    rest = f", new for {new} tensors" if new else ""
    line("INIT", f"{current} continues with its state{rest}")


def _parameter_names(state: dict[str, Any]) -> dict[int, str]:
    """Return index → name of the parameters in a state of an optimizer."""
    return {
        index: name
        for group in state["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
    }
