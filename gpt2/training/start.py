"""Setup of a session that is ready to train; all setup errors are raised before the first step."""

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpt2.config import Config
from gpt2.data import source, tokenizer
from gpt2.data.store import open_dataset
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.training.belongs import require_own
from gpt2.training.budget import Stopwatch, run_budget
from gpt2.training.heartbeat import Heartbeat
from gpt2.training.order import DataOrder
from gpt2.training.oom import DoesNotFit
from gpt2.training.records import Records
from gpt2.training.session import Session
from gpt2.training.step import optimizer_step
from gpt2.weights.hf import initialise
from lib.checkpoint import load_newest
from lib.errors import Problem, RunError
from lib.machine.observe import device_name
from lib.machine.group import Group
from lib.machine.setup import grad_scaler, preflight, set_up
from lib.optim import OPTIMIZERS
from lib.optim.groups import parameter_groups
from lib.pruning import PRUNERS
from lib.repro.rng import seed_all
from lib.repro.source import loaded_source
from lib.repro.stale import differences
from lib.repro.weights import weights_digest

_MAX_CHANGES_SHOWN = 5


def open_session(
    config: Config,
    build_dir: Path,
    records: Records,
    clock: Callable[[], float] = time.perf_counter,
    group: Group = Group(),
) -> Session:
    """Set up the machine, open the data, and build model, optimizer and pruner.

    Raises PreflightError, DataError or ConfigError if the setup fails, and RunError if the ranks of
    ``group`` have different initial weights. Nothing has been trained then.
    """
    preflight(config.machine, config.train.gpus)
    device = set_up(config.machine, group.process, config.train.gpus)
    shape = config.model.shape
    dataset = open_dataset(config.data, build_dir, shape.vocab_size)
    downloads = source.downloads_folder(config.data, build_dir)
    model = GPT(config.model)
    model.init_weights(config.seed)
    initial = initialise(model, config, build_dir, records.line)
    model.to(device)
    init_digests = _check_equal_weights(model, group)
    groups = parameter_groups(model, config.optimizer.weight_decay)
    optimizer = OPTIMIZERS.module(config.optimizer.name)(
        groups, config.optimizer, config.schedule.learning_rate
    )
    pruner = PRUNERS.module(config.pruning.name)(model, config.pruning)
    # After initialization, because it has separate generators.
    seed_all(config.seed, group.rank)
    return Session(
        run=records.run,
        config=config,
        group=group,
        device=device,
        dataset=dataset,
        tokenizer=tokenizer.load(config.data.tokenizer, downloads),
        model=model,
        forward=group.share_gradients(
            torch.compile(model) if config.machine.compile else model, config.machine.ddp_safe
        ),
        optimizer=optimizer,
        scaler=grad_scaler(config.machine),
        pruner=pruner,
        budget=run_budget(config),
        watch=Stopwatch(clock),
        evaluate=Evaluator(config, dataset.val, device, group),
        records=records,
        heartbeat=Heartbeat(records.run, group.rank, device),
        origin=_origin(device, initial),
        init_digests=init_digests,
        order=DataOrder(group),
    )


def warm_up(session: Session) -> None:
    """Run ``WARMUP_ITERATIONS`` steps, then restore weights, optimizer, scaler and generators.

    This excludes compilation, kernel selection and the allocator's growth from the timing.
    """
    iterations = session.config.machine.warmup_iterations
    if iterations == 0:
        return
    weights = {name: tensor.clone() for name, tensor in session.weights().items()}
    state = copy.deepcopy(session.state_dict())
    micro_batches = next(session.batches())
    try:
        for _ in range(iterations):
            optimizer_step(session, micro_batches, session.config.schedule.learning_rate)
    except DoesNotFit as error:
        session.records.line(
            "OOM",
            f"out of memory in the warm-up; fallbacks follow: {error.problems[0].what}",
        )
    session.load_weights(weights)
    session.load_state_dict(state)


def resume(session: Session, allow_stale: bool = False) -> None:
    """Resume from the newest intact checkpoint, or start over if there is none.

    Raises RunError if the checkpoint has another configuration or other data, or, unless
    ``allow_stale``, if it was made by other code, another torch version or another device.
    """
    records = session.records
    damaged: list[str] = []
    # The main rank reads first, because reading moves damaged checkpoints aside.
    with session.group.main_first():
        loaded = load_newest(session.run.checkpoints, damaged.append)
    for text in damaged:
        records.line("WARN", text)
    if loaded is None:
        records.rewind(0)
        if damaged:
            records.line("WARN", "no intact checkpoint is left: starts over")
        return
    require_own(session, loaded.step, loaded.state["made_for"], allow_stale)
    if changes := differences(loaded.state["origin"], session.origin):
        _refuse(session, loaded.step, changes, allow_stale)
    records.rewind(loaded.state["metrics_bytes"])
    session.load_weights(loaded.weights)
    session.load_state_dict(loaded.state["session"])
    session.saved_at = session.iteration
    records.line("TRAIN", f"resumes at iteration {session.iteration:,}{_fallback_text(session)}")


def _fallback_text(session: Session) -> str:
    """Describe the out-of-memory fallbacks of earlier processes; "" if there are none."""
    if not session.oom_fallbacks:
        return ""
    train, count = session.config.train, len(session.oom_fallbacks)
    geometry = f"BATCH_SIZE={train.batch_size} GRAD_ACCUMULATION={train.grad_accumulation}"
    return f", after {count} out-of-memory fallback(s): {geometry}"


def _check_equal_weights(model: GPT, group: Group) -> list[str]:
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
    """Return what can affect the bits of the result but is not part of the configuration.

    ``initial`` has the digests of the files that the initial weights were loaded from.
    """
    return {
        "sources": loaded_source() | initial,
        # A plain string: a checkpoint may not contain torch's version class.
        "torch": str(torch.__version__),
        "device": device_name(device),
    }


def _refuse(session: Session, step: int, changes: list[str], allow_stale: bool) -> None:
    listed = ", ".join(changes[:_MAX_CHANGES_SHOWN])
    more = len(changes) - _MAX_CHANGES_SHOWN
    what = f"the checkpoint of step {step} was made by other code: {listed}"
    what += f" and {more} more" if more > 0 else ""
    if allow_stale:
        session.records.line("WARN", f"{what}; resumed anyway")
        return
    remedy = f"to start the run again, type: make rerun RUNS={session.label}"
    raise RunError(Problem(what, str(session.run.checkpoints), remedy, code="checkpoint.stale"))
