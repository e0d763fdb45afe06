"""State of a training run in one of its processes: what a step changes, and what a checkpoint carries.

Shape suffixes: R ranks, S steps, B micro-batch or sequences of one rank and step, T tokens.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from gpt2.config import Config
from gpt2.data.dataset import PreparedDataset
from gpt2.data.loader import BatchLoader
from gpt2.data.sampler import EMPTY_ORDER_DIGEST, TrainSampler, extend_order_digest
from gpt2.data.tokenizer import Tokenizer
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.training.budget import TrainingBudget, TrainingClock
from gpt2.training.records import RecordWriter
from gpt2.training.rng import gather_rng_state, restore_rng_state
from lib.env.machine import grad_scaler
from lib.env.observe import NondeterministicOperations
from lib.env.process_group import ProcessGroup
from lib.env.sharded import placed_like, whole_copy
from lib.files import canonical_json, naming, no_follow
from lib.optim.build import build_optimizer
from lib.optim.optimizers import Optimizer, parameter_groups
from lib.pruning.pruners import Pruner, build_pruner
from lib.runs.lease import no_guard
from lib.runs.run_dir import RunDir
from lib.tracking.sidecar import Sidecars
from lib.tracking.telemetry import memory_and_cpu_seconds
from lib.units import MIB

MicroBatch = tuple[Tensor, Tensor]
# Steps whose offsets a rank keeps: a run may have no checkpoint, at which they are gathered too.
_MAX_PENDING = 1024
# The first step allocates the optimizer's state, so the second step has the peak memory.
STEPS_TO_PROBE = 2


class DataOrder:
    """Running digest of the data order, independent of the number of ranks and workers, and of resumes."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        # Of the steps before those in ``_pending``.
        self.digest = EMPTY_ORDER_DIGEST
        # Offsets of this rank for each step that is not in the digest yet.
        self._pending: list[Tensor] = []
        self._offered = torch.empty(0)

    def offered(self, offsets_B: Tensor) -> None:
        """Store this rank's sequences of the next step; the step may be offered again."""
        self._offered = offsets_B

    def consumed(self) -> None:
        """Count the sequences offered last as consumed. Must be called on every rank."""
        self._pending.append(self._offered)
        if len(self._pending) == _MAX_PENDING:
            self.state_dict()

    def state_dict(self) -> str:
        """Return the digest of all steps so far. Must be called on every rank."""
        if self._pending:
            offsets_RSB = self._group.gather(torch.stack(self._pending))
            self._pending.clear()
            for step in offsets_RSB.transpose(0, 1):
                self.digest = extend_order_digest(self.digest, step.flatten().numpy())
        return self.digest

    def load_state_dict(self, digest: str) -> None:
        self.digest = digest
        self._pending.clear()


@dataclass(kw_only=True)
class TrainState:
    """What an optimizer step reads and changes, on one of the ranks of ``group``."""

    # An out-of-memory fallback may have changed the micro-batch.
    config: Config
    group: ProcessGroup
    device: torch.device
    model: GPT
    # The model, compiled and wrapped for data parallelism as configured.
    forward: Callable[[Tensor, Tensor], Tensor]
    # The modules without weights, if the parameters are sharded.
    blank: GPT | None
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    pruner: Pruner
    # Optimizer steps done.
    iteration: int = 0
    # Remaining steps whose memory is probed before a step of several ranks; not saved.
    steps_to_probe: int = STEPS_TO_PROBE
    # Called after each micro-batch: the run makes progress.
    alive: Callable[[], None] = no_guard

    def backward(self, x_BT: Tensor, y_BT: Tensor, share: float, exchange: bool) -> Tensor:
        """Accumulate gradients of a micro-batch's loss times ``share``; return that product, detached.

        Call inside the autocast context of the forward pass. ``exchange`` makes the ranks all-reduce
        the accumulated gradients.
        """
        with self.group.exchange(self.forward, now=exchange):
            loss = self.forward(x_BT, y_BT) * share
            # Backward uses the dtypes of the forward pass without autocast.
            with torch.autocast(self.device.type, enabled=False):
                self.scaler.scale(loss).backward()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        """Return every weight under its first name, possibly sharded; a tied one appears once."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def whole_model(self) -> GPT:
        """Return the model, or a copy of a sharded one; must be called on every rank."""
        return whole_copy(self.blank, self.model) if self.blank else self.model

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy ``weights`` into the model in place, so optimizer and compiled code stay valid."""
        parameters = dict(self.model.named_parameters())
        assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
        for name, parameter in parameters.items():
            # copy_ would broadcast.
            assert parameter.shape == weights[name].shape, (name, weights[name].shape)
            parameter.copy_(placed_like(weights[name], parameter))

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Load a state of the optimizer, with each moment placed like its parameter."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

        def placed(value: Any, parameter: Tensor) -> Any:
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
            return placed_like(value, parameter) if is_moment else value

        moments = {
            index: {key: placed(value, parameters[index]) for key, value in values.items()}
            for index, values in state["state"].items()
        }
        self.optimizer.load_state_dict(state | {"state": moments})


def build_state(
    config: Config,
    model: GPT,
    group: ProcessGroup | None = None,
    device: str | torch.device = "cpu",
) -> TrainState:
    """Move ``model`` to ``device``, compile and share it; build optimizer and pruner on it."""
    group, device, machine = group or ProcessGroup(), torch.device(device), config.machine
    forward, blank = cast(nn.Module, model), None
    if group.size > 1 and machine.data_parallel == "fsdp":
        # From the CPU: the whole model may not fit into the memory of one GPU.
        blank = group.shard(model, model.blocks, device)
    else:
        if device.type != "cpu":
            # Even if nothing moves, a fake tensor cannot be swapped.
            model.to(device)
        if machine.compile:
            forward = cast(nn.Module, torch.compile(model))
        forward = group.share_gradients(forward, machine.ddp_safe)
    rule = config.optimizer.rule
    groups = parameter_groups(model, rule.weight_decay, rule.whole_matrices)
    return TrainState(
        config=config,
        group=group,
        device=device,
        model=model,
        forward=forward,
        blank=blank,
        optimizer=build_optimizer(config.optimizer, groups, config.schedule.learning_rate),
        scaler=grad_scaler(machine),
        pruner=build_pruner(config.pruning, model),
    )


@dataclass(kw_only=True)
class TrainingSession(TrainState):
    """A run: its training state, and the files, data and processes that it is trained with."""

    run: RunDir
    dataset: PreparedDataset
    tokenizer: Tokenizer
    evaluate: Evaluator
    records: RecordWriter
    budget: TrainingBudget
    clock: TrainingClock
    order: DataOrder
    # Code and machine of the run, stored in each checkpoint.
    origin: dict[str, Any]
    # SHA-256 of the initial weights of each rank; all are equal.
    init_digests: list[str]
    # Share of the budget used by the steps done.
    progress: float = 0.0
    # Iterations of the last evaluation, statistics and checkpoint.
    evaluated_at: int = 0
    statistics_at: int = 0
    saved_at: int = 0
    # Out-of-memory fallbacks in order: the manifest's ``oom_fallbacks``.
    oom_fallbacks: list[dict[str, Any]] = field(default_factory=list)
    # Divisions of a batch with which the first iterations were trained, if not as configured.
    earlier_divisions: list[dict[str, Any]] = field(default_factory=list)
    # Operations without a deterministic implementation, if DETERMINISTIC is warn.
    nondeterministic_ops: NondeterministicOperations | None = None
    # Seconds spent waiting for each batch since the last heartbeat.
    waits: list[float] = field(default_factory=list)
    # Started after the manifest is written.
    sidecars: Sidecars = field(default_factory=Sidecars)

    @property
    def tokens(self) -> int:
        """Return the number of training tokens consumed."""
        return self.iteration * self.budget.tokens_per_iteration

    def sampler(self) -> TrainSampler:
        """Return the training sequences in the order of the seed."""
        length = self.config.model.shape.block_size
        return TrainSampler(self.dataset.train, length, self.config.seed)

    def batches(self) -> Iterator[list[MicroBatch]]:
        """Return an iterator over this rank's micro-batches, a list per step from ``iteration`` on."""
        return iter(self.loader())

    def loader(self) -> BatchLoader:
        return BatchLoader(
            self.sampler(),
            self.config.data,
            self.config.train.global_batch,
            self.config.train.batch_size,
            self.group.rank,
            self.group.size,
            self.iteration,
            self.device.type == "cuda",
            self.order.offered,
        )

    def beat(self, message: str, **facts: Any) -> None:
        """Append a line to heartbeat_rank<rank>.jsonl of this rank, without syncing it to the disk.

        At the start, at each log interval, evaluation and statistics.
        """
        now, path = time.time(), self.run.heartbeat(self.group.rank)
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device) / MIB
            reserved = torch.cuda.memory_reserved(self.device) / MIB
        else:
            # Resident memory.
            allocated = reserved = memory_and_cpu_seconds([os.getpid()])[0]
        record = {
            "ts": now,
            "iso": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)),
            "pid": os.getpid(),
            "rank": self.group.rank,
            "step": self.iteration,
            "msg": message,
            "dt_fetch_s": fmean(self.waits) if self.waits else None,
            "mem_alloc_mib": allocated,
            "mem_reserved_mib": reserved,
            **facts,
        }
        self.waits.clear()
        self.records.guard()
        with naming(path), open(path, "a", encoding="utf-8", opener=no_follow) as stream:
            stream.write(canonical_json(record) + "\n")

    @property
    def configured(self) -> Config:
        """Return the configuration of the run, whose micro-batch no out-of-memory fallback changed."""
        return Config.from_values(self.config.values)

    def apply_fallback(self, record: dict[str, Any]) -> None:
        """Apply the out-of-memory fallback ``record["to"]``, which may replace ``config``."""
        to = record["to"]
        self.oom_fallbacks = [*self.oom_fallbacks, record]
        self.steps_to_probe = STEPS_TO_PROBE
        if "micro_batch" in to:
            sizes = {"batch_size": to["micro_batch"], "grad_accumulation": to["accumulation"]}
            self.config = replace(self.config, train=replace(self.config.train, **sizes))
        else:
            self.model.grad_checkpointing = to["on"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume, except the weights, of this shard; called on every rank."""
        return {
            "iteration": self.iteration,
            "progress": self.progress,
            "evaluated_at": self.evaluated_at,
            "told_at": self.statistics_at,
            "train_seconds": self.clock.seconds,
            "budget": {"warmup_progress": self.budget.measured_warmup},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "pruner": self.pruner.state_dict(),
            "data_order": self.order.state_dict(),
            "rng": gather_rng_state(self.group, self.device),
            "oom_fallbacks": self.oom_fallbacks,
            "earlier_divisions": self.earlier_divisions,
            "warned": self.nondeterministic_ops.names if self.nondeterministic_ops else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``, except the weights, and apply its out-of-memory fallbacks."""
        self.iteration = state["iteration"]
        self.progress = state["progress"]
        self.evaluated_at = state["evaluated_at"]
        self.statistics_at = state["told_at"]
        self.clock.resume_at(state["train_seconds"])
        self.budget.measured_warmup = state["budget"]["warmup_progress"]
        self.load_optimizer(state["optimizer"])
        # Without fp16 the scaler has no state and rejects an empty one.
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.pruner.load_state_dict(state["pruner"])
        self.order.load_state_dict(state["data_order"])
        restore_rng_state(state["rng"], self.group, self.device)
        self.earlier_divisions = state["earlier_divisions"]
        if self.nondeterministic_ops:
            self.nondeterministic_ops.add(state["warned"])
        self.oom_fallbacks = []
        for record in state["oom_fallbacks"]:
            self.apply_fallback(record)


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step, still on the device; reading them synchronizes with the GPU."""

    # Mean over the tokens of the global batch, in nats.
    loss: Tensor
    # 2-norm of each parameter's gradient before clipping, in the order of model.parameters().
    gradient_norms: Tensor
    gradient_norm: Tensor


@dataclass(frozen=True)
class StepSnapshot:
    """A step's inputs on this rank, sufficient to repeat the step."""

    micro_batches: list[MicroBatch]
    lr: float
    # States of the generators used by dropout.
    rng: dict[str, Tensor]

    @classmethod
    def now(cls, state: TrainState, micro_batches: list[MicroBatch], lr: float) -> Self:
        rng = {"torch": torch.get_rng_state()}
        if state.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(state.device)
        return cls(micro_batches, lr, rng)

    def undo(self, state: TrainState) -> None:
        """Roll back the passes: clear gradients and restore generators. Weights are unchanged."""
        state.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(self.rng["torch"])
        if "cuda" in self.rng:
            torch.cuda.set_rng_state(self.rng["cuda"], state.device)


def on_device(device: torch.device, batches: list[MicroBatch]) -> Iterable[MicroBatch]:
    """Yield micro-batches on the device; copies from page-locked memory are asynchronous."""
    for x_BT, y_BT in batches:
        yield x_BT.to(device, non_blocking=True), y_BT.to(device, non_blocking=True)
