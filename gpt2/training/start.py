"""From a configuration to a session that is ready to train: every error comes before step 0."""

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

_NAMED_FILES = 5


def open_session(
    config: Config,
    build_dir: Path,
    records: Records,
    clock: Callable[[], float] = time.perf_counter,
    group: Group = Group(),
) -> Session:
    """Set the machine up, open the data, build model, optimizer and pruner.

    PreflightError, DataError or ConfigError where that cannot be done, RunError where ``group``
    does not start from the same weights; nothing has been trained.
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
    init_digests = _same_weights(model, group)
    groups = parameter_groups(model, config.optimizer.weight_decay)
    optimizer = OPTIMIZERS.module(config.optimizer.name)(
        groups, config.optimizer, config.schedule.learning_rate
    )
    pruner = PRUNERS.module(config.pruning.name)(model, config.pruning)
    # After initialisation, which has generators of its own.
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
    """Run ``WARMUP_ITERATIONS`` steps and take them back: weights, optimizer, scaler, randomness.

    Compilation, kernel choice and the allocator's growth then stay out of the timing.
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
        session.records.line("OOM", f"the warm-up does not fit, the first step decides: {error}")
    session.load_weights(weights)
    session.load_state_dict(state)


def resume(session: Session, allow_stale: bool = False) -> None:
    """Continue from the newest good checkpoint, or from the start where there is none.

    RunError when it is of another configuration or other data; and when other code, another torch
    or another device made it, unless ``allow_stale``.
    """
    records = session.records
    damaged: list[str] = []
    # The first to read puts damaged ones aside.
    with session.group.main_first():
        found = load_newest(session.run.checkpoints, damaged.append)
    for text in damaged:
        records.line("WARN", text)
    if found is None:
        records.rewind(0)
        if damaged:
            records.line("WARN", "no good checkpoint is left: starts over")
        return
    require_own(session, found.step, found.state["made_for"], allow_stale)
    if changes := differences(found.state["origin"], session.origin):
        _refuse(session, found.step, changes, allow_stale)
    records.rewind(found.state["metrics_bytes"])
    session.load_weights(found.weights)
    session.load_state_dict(found.state["session"])
    session.saved_at = session.iteration
    records.line("TRAIN", f"resumes at iteration {session.iteration:,}{_given_up(session)}")


def _given_up(session: Session) -> str:
    """What an earlier process fell back to when memory ran out; else nothing."""
    if not session.oom_fallbacks:
        return ""
    train, count = session.config.train, len(session.oom_fallbacks)
    geometry = f"BATCH_SIZE={train.batch_size} GRAD_ACCUMULATION={train.grad_accumulation}"
    return f", after {count} fallback(s) out of memory: {geometry}"


def _same_weights(model: GPT, group: Group) -> list[str]:
    """The digest of each rank's weights. RunError naming the ranks that differ from rank 0.

    Nothing later would show it: every rank adds the same gradients to weights of its own.
    """
    digest = bytearray.fromhex(weights_digest(dict(model.named_parameters())))
    rows = group.gather(torch.frombuffer(digest, dtype=torch.uint8)).tolist()
    digests = [bytes(row).hex() for row in rows]
    if others := [str(rank) for rank, found in enumerate(digests) if found != digests[0]]:
        raise RunError(f"the first weights of rank {', '.join(others)} are not those of rank 0")
    return digests


def _origin(device: torch.device, initial: dict[str, str]) -> dict[str, Any]:
    """What may change a bit of the result and stands in no configuration.

    ``initial`` are the digests of the files that the initial weights came from.
    """
    return {
        "sources": loaded_source() | initial,
        # A plain string: torch's own class is not among what a checkpoint may hold.
        "torch": str(torch.__version__),
        "device": device_name(device),
    }


def _refuse(session: Session, step: int, changes: list[str], allow_stale: bool) -> None:
    named = ", ".join(changes[:_NAMED_FILES])
    more = len(changes) - _NAMED_FILES
    what = f"the checkpoint of step {step} was made by other code: {named}"
    what += f" and {more} more" if more > 0 else ""
    if allow_stale:
        session.records.line("WARN", f"{what}; it is resumed all the same")
        return
    remedy = f"type: make rerun RUNS={session.label}, which starts the run anew"
    raise RunError(Problem(what, str(session.run.checkpoints), remedy))
