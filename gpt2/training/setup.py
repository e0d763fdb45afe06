"""Set-up of a training session: open it, warm up, resume from a checkpoint.

A checkpoint must match the configuration, the data and the code of the run that resumes from it.
All errors of the set-up are raised before the first step.
"""

import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gpt2.config import DIVISION, Config
from gpt2.data import tokenizer
from gpt2.data.dataset import data_folder, open_dataset
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.records.files import read_resolved_config
from gpt2.training.budget import TrainingClock, run_budget
from gpt2.training.records import Heartbeat, RecordWriter
from gpt2.training.session import TrainingSession
from gpt2.training.state import DataOrder, RankGenerators, TrainState
from gpt2.training.step import StepOutOfMemory, optimizer_step
from gpt2.weights.convert import load_initial_weights
from gpt2.weights.source import run_of, weights_folder
from lib.env.hardware import device_name
from lib.env.machine import grad_scaler, set_up
from lib.env.preflight import require_machine
from lib.env.process_group import ProcessGroup
from lib.errors import Problem, RunError
from lib.optim.build import build_optimizer
from lib.optim.optimizers import parameter_groups
from lib.pruning.pruners import build_pruner
from lib.runs.checkpoint import (
    Checkpoint,
    load_latest_checkpoint,
    read_checkpoint,
    set_checkpoint_aside,
    weights_digest,
)
from lib.runs.code import drift, loaded_source
from lib.runs.identity import flatten_identity
from lib.runs.rng import seed_all
from lib.units import first_of


def run_fingerprint(session: TrainingSession) -> dict[str, Any]:
    """Return the fingerprint stored in a checkpoint: configured identity and data digest."""
    # Not session.config: an out-of-memory fallback may have changed the micro-batch there.
    configured = Config.from_values(session.config.values)
    return {"config": configured.identity(), "data": session.dataset.digest}


def require_match(session: TrainingSession, step: int, recorded: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint of ``step``, for ``recorded``, has another division of a batch.

    Raises RunError if it was made for anything else than this run.
    """
    saved, current = map(flatten_identity, (recorded, run_fingerprint(session)))
    names = [n for n in sorted(saved | current) if saved.get(n) != current.get(n)]
    listed = ", ".join(f"{name} (was {saved.get(name)}, is {current.get(name)})" for name in names)
    if DIVISION.issuperset(name.removeprefix("config.") for name in names):
        if names:
            session.records.line("WARN", f"another division from step {step} on: {listed}")
        return bool(names)
    what = f"the checkpoint of step {step} belongs to another run: {listed}"
    remedy = f"to start the run again, type: make rerun RUNS={session.label}"
    raise RunError(Problem(what, str(session.run.checkpoints), remedy, code="checkpoint.mismatch"))


# Setup of a session that is ready to train; all setup errors are raised before the first step.


def open_session(
    config: Config,
    build_dir: Path,
    records: RecordWriter,
    clock: Callable[[], float] = time.perf_counter,
    group: ProcessGroup | None = None,
) -> TrainingSession:
    """Set up the machine, open the data, and build model, optimizer and pruner.

    Raises PreflightError, DataError or ConfigError if the setup fails, and RunError if the ranks of
    ``group`` have different initial weights. Nothing has been trained then.
    """
    group = group or ProcessGroup()
    require_machine(config.machine, config.train.gpus)
    device = set_up(config.machine, group.process, config.train.gpus)
    shape = config.model.shape
    dataset = open_dataset(config.data, build_dir, shape.vocab_size)
    model = GPT(config.model)
    model.init_weights(config.seed, config.init.init_stream)
    initial = load_initial_weights(model, config, build_dir, records.line)
    init_digests = _check_equal_weights(model, group)
    forward, blank = place_model(config, model, group, device)
    state = build_state(config, model, clock, group, device)
    state.blank = blank
    if config.init.iteration is not None:
        _continue_optimizer(state, config, build_dir, records.line)
    # After initialization, because it has separate generators.
    seed_all(config.seed, group.rank)
    return TrainingSession(
        run=records.run,
        config=config,
        group=group,
        device=device,
        dataset=dataset,
        tokenizer=tokenizer.load_tokenizer(
            config.data.tokenizer, data_folder(config.data, build_dir)
        ),
        state=state,
        forward=forward,
        evaluate=Evaluator(config, dataset.val, device, group, records.evaluated),
        records=records,
        heartbeat=Heartbeat(records.run, group.rank, device, records.guard),
        origin=_origin(device, initial),
        init_digests=init_digests,
    )


def _continue_optimizer(
    state: TrainState, config: Config, build_dir: Path, line: Callable[[str, str], None]
) -> None:
    """Give the optimizer its state in the checkpoint of ``INIT_FROM``, unless it is another one."""
    folder = weights_folder(config, build_dir)
    theirs, ours = read_resolved_config(run_of(folder)).optimizer.name, config.optimizer.name
    if theirs != ours:
        line("INIT", f"new optimizer state: the run has {theirs}, this one {ours}")
        return
    try:
        new = state.take_moments(read_checkpoint(folder).state["session"]["optimizer"])
    except _WRONG_CONTENT as error:
        what = f"no state of {ours} ({type(error).__name__})"
        raise RunError(Problem(what, str(folder), code="checkpoint.damaged")) from error
    rest = f", new for {len(new)} tensors" if new else ""
    line("INIT", f"{ours} continues with its state{rest}")


def place_model(
    config: Config, model: GPT, group: ProcessGroup, device: torch.device
) -> tuple[nn.Module, GPT | None]:
    """Move ``model`` to ``device``; return it as compiled and shared by the ranks as configured.

    Sharded weights come with a copy of the modules without weights. Optimizers and pruners are
    built afterwards.
    """
    if group.size > 1 and config.machine.data_parallel == "fsdp":
        # From the CPU: the whole model may not fit into the memory of one GPU.
        return model, group.shard(model, model.blocks, device)
    if device.type != "cpu":
        # Even if nothing moves, a fake tensor cannot be swapped.
        model.to(device)
    forward: nn.Module = model
    if config.machine.compile:
        forward = cast(nn.Module, torch.compile(model))
    return group.share_gradients(forward, config.machine.ddp_safe), None


def build_state(
    config: Config,
    model: GPT,
    clock: Callable[[], float],
    group: ProcessGroup,
    device: torch.device,
) -> TrainState:
    """Return the state of a run at its start; ``clock`` returns seconds."""
    groups = parameter_groups(model, config.optimizer.weight_decay)
    return TrainState(
        model=model,
        optimizer=build_optimizer(config.optimizer, groups, config.schedule.learning_rate),
        scaler=grad_scaler(config.machine),
        pruner=build_pruner(config.pruning, model),
        budget=run_budget(config),
        clock=TrainingClock(clock),
        order=DataOrder(group),
        generators=RankGenerators(group, device),
    )


def warm_up(session: TrainingSession) -> None:
    """Run ``WARMUP_ITERATIONS`` steps, then restore weights, optimizer, scaler and generators.

    This excludes compilation, kernel selection and the allocator's growth from the timing.
    """
    iterations = session.config.machine.warmup_iterations
    if iterations == 0:
        return
    weights = {name: tensor.clone() for name, tensor in session.state.weights().items()}
    state = copy.deepcopy(session.state.state_dict())
    micro_batches = next(session.batches())
    try:
        for _ in range(iterations):
            optimizer_step(session, micro_batches, session.config.schedule.learning_rate)
    except StepOutOfMemory as error:
        session.records.line(
            "OOM",
            f"out of memory in the warm-up; fallbacks follow: {error.problems[0].what}",
        )
    session.state.load_weights(weights)
    session.load_state_dict(state)


def resume(session: TrainingSession, allow_stale: bool = False) -> None:
    """Resume from the newest intact checkpoint that fits the records, or start over without one.

    Raises RunError if the records fit no intact checkpoint, if the checkpoint has another
    configuration or other data, or, unless ``allow_stale``, if it was made by other code, another
    torch version or another device.
    """
    records = session.records
    damaged: list[str] = []
    # The main rank reads first, because reading moves damaged checkpoints aside.
    with session.group.main_first():
        loaded = load_latest_checkpoint(
            session.run.checkpoints, damaged.append, partial(_records_mismatch, session)
        )
    for text in damaged:
        records.line("WARN", text)
    if loaded is None:
        records.rewind({})
        # A process before this one may have renamed the last checkpoint.
        if damaged or any(session.run.checkpoints.glob("damaged-*")):
            records.line("WARN", "no intact checkpoint is left: starts over")
        return
    try:
        _restore(session, loaded, allow_stale)
    except _WRONG_CONTENT as error:
        raise _not_restored(session, loaded.step, error) from error
    session.state.saved_at = session.state.iteration
    records.line(
        "TRAIN", f"resumes at iteration {session.state.iteration:,}{_fallback_text(session)}"
    )


# Errors of state whose digests match, but whose content is not of this run's model and optimizer.
_WRONG_CONTENT = (
    *(AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError),
)


def _records_mismatch(session: TrainingSession, loaded: Checkpoint) -> Problem | None:
    """Return the problem if a record differs from its content at the checkpoint."""
    try:
        return session.records.mismatch(loaded.state["records"])
    except _WRONG_CONTENT as error:
        what = f"checkpoint of step {loaded.step} has no sizes of the records ({error!r:.120})"
        remedy = f"type: make rerun RUNS={session.run.path.name}"
        return Problem(what, str(session.run.checkpoints), remedy, code="checkpoint.damaged")


def _restore(session: TrainingSession, loaded: Checkpoint, allow_stale: bool) -> None:
    """Load a checkpoint into the session, unless it was made for something else."""
    state = loaded.state["session"]
    if require_match(session, loaded.step, loaded.state["made_for"]):
        state = _divided_anew(loaded)
    if changes := drift(loaded.state["origin"], session.origin):
        _refuse(session, loaded.step, changes, allow_stale)
    session.records.rewind(loaded.state["records"])
    session.state.load_weights(loaded.weights)
    session.load_state_dict(state)


def _divided_anew(loaded: Checkpoint) -> dict[str, Any]:
    """Return the state of a session, with the division of the checkpoint as an earlier one.

    The fallbacks after running out of memory are those of that division.
    """
    state, config = loaded.state["session"], loaded.state["made_for"]["config"]
    earlier: dict[str, Any] = {"iterations": loaded.step, "oom_fallbacks": state["oom_fallbacks"]}
    for area, name in (path.split(".") for path in sorted(DIVISION)):
        # A setting at its off-value is not part of the identity.
        if name in config[area]:
            earlier[name] = config[area][name]
    divisions = [*state.get("earlier_divisions", []), earlier]
    return {**state, "oom_fallbacks": [], "earlier_divisions": divisions}


def _not_restored(session: TrainingSession, step: int, error: Exception) -> RunError:
    """Set a checkpoint of another content aside and return the error.

    The session may be restored in part, so only a new process can take an earlier checkpoint.
    """
    if session.group.is_main:
        set_checkpoint_aside(session.run.checkpoint(step))
    text = " ".join(str(error).split())[:120]
    what = f"checkpoint of step {step} cannot be restored ({type(error).__name__}: {text})"
    advice = "renamed to damaged-*; type: make, to continue from the checkpoint before"
    return RunError(Problem(what, str(session.run.checkpoints), advice, code="checkpoint.damaged"))


def _fallback_text(session: TrainingSession) -> str:
    """Describe the out-of-memory fallbacks of earlier processes; "" if there are none."""
    if not session.state.oom_fallbacks:
        return ""
    train, count = session.config.train, len(session.state.oom_fallbacks)
    geometry = f"BATCH_SIZE={train.batch_size} GRAD_ACCUMULATION={train.grad_accumulation}"
    return f", after {count} out-of-memory fallback(s): {geometry}"


def _check_equal_weights(model: GPT, group: ProcessGroup) -> list[str]:
    """Return the digest of each rank's weights. Raises RunError if a rank differs from rank 0.

    Different initial weights would not be detected later, because all ranks apply equal gradients.
    """
    digest = bytearray.fromhex(weights_digest(dict(model.named_parameters())))
    rows = group.gather(torch.frombuffer(digest, dtype=torch.uint8)).tolist()
    digests = [bytes(row).hex() for row in rows]
    if ranks := [str(rank) for rank, other in enumerate(digests) if other != digests[0]]:
        what = f"initial weights of rank {', '.join(ranks)} differ from rank 0"
        raise RunError(Problem(what, code="run.rank-mismatch"))
    return digests


def _origin(device: torch.device, initial: dict[str, str]) -> dict[str, Any]:
    """Return the facts outside the configuration that can affect the bits of the result.

    ``initial`` has the digests of the files that the initial weights were loaded from.
    """
    return {
        "sources": loaded_source() | initial,
        # A plain string: a checkpoint may not contain torch's version class.
        "torch": str(torch.__version__),
        "device": device_name(device),
    }


def _refuse(session: TrainingSession, step: int, changes: list[str], allow_stale: bool) -> None:
    what = f"the checkpoint of step {step} was made by other code: {first_of(changes, 5)}"
    if allow_stale:
        session.records.line("WARN", f"{what}; resumed anyway")
        return
    remedy = f"to start the run again, type: make rerun RUNS={session.label}"
    raise RunError(
        Problem(what, str(session.run.checkpoints), remedy, code="checkpoint.other-code")
    )
