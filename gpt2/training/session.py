"""State of a training run, and the part of it that is saved in checkpoints."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.data.loader import BatchLoader
from gpt2.data.sampler import EMPTY_ORDER_DIGEST, TrainSampler, extend_order_digest
from gpt2.data.store import PreparedDataset
from gpt2.data.tokenizer import Tokenizer
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.training.budget import TrainingBudget, TrainingClock
from gpt2.training.records import Heartbeat, RecordWriter
from lib.env.observe import NondeterministicOperations
from lib.env.process_group import ProcessGroup
from lib.optim.optimizers import Optimizer
from lib.pruning.pruners import Pruner
from lib.runs.rng import rng_state, set_rng_state
from lib.runs.run_dir import RunDir
from lib.tracking.sidecar import Sidecars

# Digest of the data order: the sequences that all ranks consumed, step by step.
#
# Shape suffixes: R ranks, S steps, B sequences of one rank and step.


# Steps buffered per rank before their offsets are gathered.
_STEPS_PER_EXCHANGE = 64


class DataOrder:
    """Running ``order_digest``, independent of the number of ranks and workers, and of resumes."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._digest = EMPTY_ORDER_DIGEST
        # Offsets of this rank for each step that is not in the digest yet.
        self._pending: list[Tensor] = []
        self._offered = torch.empty(0)

    def offered(self, offsets_B: Tensor) -> None:
        """Store this rank's sequences of the next step; the step may be offered again."""
        self._offered = offsets_B

    def consumed(self) -> None:
        """Count the sequences offered last as consumed. Must be called on every rank."""
        self._pending.append(self._offered)
        if len(self._pending) == _STEPS_PER_EXCHANGE or self._group.size == 1:
            self._exchange()

    def state_dict(self) -> str:
        """Return the digest of all steps so far. Must be called on every rank."""
        self._exchange()
        return self._digest

    def load_state_dict(self, digest: str) -> None:
        """Continue after the steps of ``digest``."""
        self._digest = digest
        self._pending.clear()

    @property
    def digest(self) -> str:
        """Return the last result of ``state_dict``, without communication."""
        return self._digest

    def _exchange(self) -> None:
        if not self._pending:
            return
        offsets_RSB = self._group.gather(torch.stack(self._pending))
        self._pending.clear()
        for step in offsets_RSB.transpose(0, 1):
            self._digest = extend_order_digest(self._digest, step.flatten().numpy())


# Generators used by dropout; their states differ between ranks.
_PER_RANK_GENERATORS = {"torch", "cuda"}
# The first step allocates the optimizer's state, so the second step has the peak memory.
_STEPS_TO_PROBE = 2


@runtime_checkable
class SupportsGradCheckpointing(Protocol):
    """Interface of a model that supports gradient checkpointing."""

    grad_checkpointing: bool


@dataclass
class TrainingSession:
    """Configuration, components and progress of one run in one of its processes."""

    run: RunDir
    config: Config
    group: ProcessGroup
    device: torch.device
    dataset: PreparedDataset
    tokenizer: Tokenizer
    model: GPT
    # The model, compiled and wrapped for data parallelism as configured.
    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    pruner: Pruner
    budget: TrainingBudget
    watch: TrainingClock
    evaluate: Evaluator
    records: RecordWriter
    heartbeat: Heartbeat
    # Code and machine of the run, stored in each checkpoint.
    origin: dict[str, Any]
    # SHA-256 of the initial weights of each rank; all are equal.
    init_digests: list[str]
    order: DataOrder
    # Started after the manifest is written.
    companions: Sidecars = field(default_factory=Sidecars)
    # Operations without a deterministic implementation, if DETERMINISTIC is warn.
    warned: NondeterministicOperations | None = None
    # Optimizer steps done.
    iteration: int = 0
    # Share of the budget used by those steps.
    progress: float = 0.0
    # Iterations of the last evaluation, statistics and checkpoint.
    evaluated_at: int = 0
    told_at: int = 0
    saved_at: int = 0
    # Out-of-memory fallbacks in order: the manifest's ``oom_fallbacks``.
    oom_fallbacks: list[dict[str, Any]] = field(default_factory=list)
    # Remaining steps whose memory is probed before a step of several ranks.
    unproved: int = _STEPS_TO_PROBE

    @property
    def label(self) -> str:
        """Return the name of the run in log lines: the name of its directory."""
        return self.run.path.name

    @property
    def tokens(self) -> int:
        """Return the number of training tokens consumed."""
        return self.iteration * self.budget.tokens_per_iteration

    def weights(self) -> dict[str, Tensor]:
        """Return every weight under its first name; a tied matrix appears once."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def batches(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Return an iterator over this rank's micro-batches, a list per step from ``iteration`` on.

        Each step that is yielded is recorded in ``order``.
        """
        train = self.config.train
        sampler = TrainSampler(
            self.dataset.train, self.config.model.shape.block_size, self.config.seed
        )
        loader = BatchLoader(
            sampler,
            self.config.data,
            train.global_batch,
            train.batch_size,
            self.group.rank,
            self.group.size,
            self.iteration,
            self.device.type == "cuda",
            self.order.offered,
        )
        return iter(loader)

    def fall_back(self, record: dict[str, Any]) -> None:
        """Apply the out-of-memory fallback ``record["to"]``, which may replace ``config``."""
        to = record["to"]
        self.oom_fallbacks = [*self.oom_fallbacks, record]
        self.unproved = _STEPS_TO_PROBE
        if "micro_batch" in to:
            train = replace(
                self.config.train,
                batch_size=to["micro_batch"],
                grad_accumulation=to["accumulation"],
            )
            self.config = replace(self.config, train=train)
        else:
            assert isinstance(self.model, SupportsGradCheckpointing)
            self.model.grad_checkpointing = to["on"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, except the weights. Must be called on every rank."""
        return {
            "iteration": self.iteration,
            "progress": self.progress,
            "evaluated_at": self.evaluated_at,
            "told_at": self.told_at,
            "train_seconds": self.watch.seconds,
            "budget": self.budget.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "pruner": self.pruner.state_dict(),
            "data_order": self.order.state_dict(),
            "rng": self._rng_of_all_ranks(),
            "oom_fallbacks": self.oom_fallbacks,
            "warned": self.warned.names if self.warned else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``; the weights are loaded separately."""
        self.iteration = state["iteration"]
        self.progress = state["progress"]
        self.evaluated_at = state["evaluated_at"]
        self.told_at = state["told_at"]
        self.watch.resume_at(state["train_seconds"])
        self.budget.load_state_dict(state["budget"])
        self.optimizer.load_state_dict(state["optimizer"])
        # Without fp16 the scaler has no state and rejects an empty one.
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.pruner.load_state_dict(state["pruner"])
        self.order.load_state_dict(state["data_order"])
        self._set_rng(state["rng"])
        if self.warned:
            self.warned.add(state["warned"])
        self.oom_fallbacks = []
        for record in state["oom_fallbacks"]:
            self.fall_back(record)

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy ``weights`` into the model in place, so optimizer and compiled code stay valid."""
        parameters = dict(self.model.named_parameters())
        assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])

    def _rng_of_all_ranks(self) -> dict[str, Any]:
        """Return the generator states; those that differ per rank are gathered [R, bytes]."""
        state = rng_state(self.device)
        return state | {
            name: self.group.gather(state[name]) for name in _PER_RANK_GENERATORS & state.keys()
        }

    def _set_rng(self, state: dict[str, Any]) -> None:
        """Restore the generators; a rank missing in the saved run keeps its seeded stream."""
        if self.group.rank < len(state["torch"]):
            # Clone: torch misreads a row view of a larger tensor, and crashes.
            names = _PER_RANK_GENERATORS & state.keys()
            rank_state = {name: state[name][self.group.rank].clone() for name in names}
            set_rng_state(state | rank_state, self.device)


# Parts of a step before the update: micro-batches, forward and backward passes, step metrics.
#
# Shape suffixes: B micro-batch, b part of a micro-batch, T tokens.


MicroBatch = tuple[Tensor, Tensor]


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
    """Snapshot of a step's inputs on this rank, sufficient to repeat the step."""

    micro_batches: list[MicroBatch]
    lr: float
    # States of the generators used by dropout.
    rng: dict[str, Tensor]

    @classmethod
    def now(cls, session: TrainingSession, micro_batches: list[MicroBatch], lr: float) -> Self:
        """Return the snapshot of the step about to be run."""
        rng = {"torch": torch.get_rng_state()}
        if session.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(session.device)
        return cls(micro_batches, lr, rng)

    def undo(self, session: TrainingSession) -> None:
        """Roll back the passes: clear gradients and restore generators. Weights are unchanged."""
        session.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(self.rng["torch"])
        if "cuda" in self.rng:
            torch.cuda.set_rng_state(self.rng["cuda"], session.device)


def split_micro_batches(batches: list[MicroBatch], size: int) -> list[MicroBatch]:
    """Split micro-batches into ones of ``size`` sequences, a divisor of theirs, in equal order."""
    return [
        (x_bT, y_bT)
        for x_BT, y_BT in batches
        for x_bT, y_bT in zip(x_BT.split(size), y_BT.split(size), strict=True)
    ]


def on_device(session: TrainingSession, batches: list[MicroBatch]) -> Iterable[MicroBatch]:
    """Yield micro-batches on the device; copies from page-locked memory are asynchronous."""
    for x_BT, y_BT in batches:
        yield (
            x_BT.to(session.device, non_blocking=True),
            y_BT.to(session.device, non_blocking=True),
        )


def forward_backward(
    session: TrainingSession, x_BT: Tensor, y_BT: Tensor, share: float, exchange: bool
) -> Tensor:
    """Accumulate gradients of a micro-batch's loss times ``share``; return that product, detached.

    Call inside the autocast context of the forward pass. ``exchange`` makes the ranks all-reduce
    the accumulated gradients.
    """
    with session.group.exchange(session.forward, now=exchange):
        loss = session.forward(x_BT, y_BT) * share
        # Backward uses the dtypes of the forward pass without autocast.
        with torch.autocast(session.device.type, enabled=False):
            session.scaler.scale(loss).backward()
    return loss.detach()
