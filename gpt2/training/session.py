"""A training run in one of its processes: its state, and the resources that the process holds.

Shape suffixes: B micro-batch, b part of a micro-batch, T tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.data.dataset import PreparedDataset
from gpt2.data.loader import BatchLoader
from gpt2.data.sampler import TrainSampler
from gpt2.data.tokenizer import Tokenizer
from gpt2.evaluate import Evaluator
from gpt2.training.records import Heartbeat, RecordWriter
from gpt2.training.state import STEPS_TO_PROBE, TrainState
from lib.env.process_group import ProcessGroup
from lib.runs.run_dir import RunDir
from lib.tracking.sidecar import Sidecars

MicroBatch = tuple[Tensor, Tensor]


@runtime_checkable
class SupportsGradCheckpointing(Protocol):
    """Interface of a model that supports gradient checkpointing."""

    grad_checkpointing: bool


@dataclass
class TrainingSession:
    """State of a run, and the files, data, devices and processes that it is trained with."""

    run: RunDir
    # An out-of-memory fallback may have changed the micro-batch.
    config: Config
    group: ProcessGroup
    device: torch.device
    dataset: PreparedDataset
    tokenizer: Tokenizer
    state: TrainState
    # The model, compiled and wrapped for data parallelism as configured.
    forward: Callable[[Tensor, Tensor], Tensor]
    evaluate: Evaluator
    records: RecordWriter
    heartbeat: Heartbeat
    # Code and machine of the run, stored in each checkpoint.
    origin: dict[str, Any]
    # SHA-256 of the initial weights of each rank; all are equal.
    init_digests: list[str]
    # Started after the manifest is written.
    sidecars: Sidecars = field(default_factory=Sidecars)

    @property
    def label(self) -> str:
        """Return the name of the run in log lines: the name of its directory."""
        return self.run.path.name

    def batches(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Return an iterator over this rank's micro-batches, a list per step from ``iteration`` on.

        Each step that is yielded is recorded in the data order.
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
            self.state.iteration,
            self.device.type == "cuda",
            self.state.order.offered,
        )
        return iter(loader)

    def apply_fallback(self, record: dict[str, Any]) -> None:
        """Apply the out-of-memory fallback ``record["to"]``, which may replace ``config``."""
        to = record["to"]
        self.state.oom_fallbacks = [*self.state.oom_fallbacks, record]
        self.state.steps_to_probe = STEPS_TO_PROBE
        if "micro_batch" in to:
            train = replace(
                self.config.train,
                batch_size=to["micro_batch"],
                grad_accumulation=to["accumulation"],
            )
            self.config = replace(self.config, train=train)
        else:
            assert isinstance(self.state.model, SupportsGradCheckpointing)
            self.state.model.grad_checkpointing = to["on"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``, except the weights, and apply its out-of-memory fallbacks."""
        self.state.load_state_dict(state)
        self.state.oom_fallbacks = []
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
        session.state.optimizer.zero_grad(set_to_none=True)
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
            session.state.scaler.scale(loss).backward()
    return loss.detach()
