"""State of a training run, and the part of it that is saved in checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.data.loader import BatchLoader
from gpt2.data.sampler import TrainSampler
from gpt2.data.store import Dataset
from gpt2.data.tokenizer import Tokenizer
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.training.budget import Budget, Stopwatch
from gpt2.training.heartbeat import Heartbeat
from gpt2.training.order import DataOrder
from gpt2.training.records import Records
from lib.machine.group import Group
from lib.machine.warned import WarnedOperations
from lib.optim.contract import Optimizer
from lib.pruning.contract import Pruner
from lib.repro.rng import rng_state, set_rng_state
from lib.rundir import RunDir
from lib.companions import Companions

# Generators used by dropout; their states differ between ranks.
_PER_RANK_GENERATORS = {"torch", "cuda"}
# The first step allocates the optimizer's state, so the second step has the peak memory.
_STEPS_TO_PROBE = 2


@runtime_checkable
class Recomputing(Protocol):
    """Interface of a model that supports gradient checkpointing."""

    grad_checkpointing: bool


@dataclass
class Session:
    """Configuration, components and progress of one run in one of its processes."""

    run: RunDir
    config: Config
    group: Group
    device: torch.device
    dataset: Dataset
    tokenizer: Tokenizer
    model: GPT
    # The model, compiled and wrapped for data parallelism as configured.
    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    pruner: Pruner
    budget: Budget
    watch: Stopwatch
    evaluate: Evaluator
    records: Records
    heartbeat: Heartbeat
    # Code and machine of the run, stored in each checkpoint.
    origin: dict[str, Any]
    # SHA-256 of the initial weights of each rank; all are equal.
    init_digests: list[str]
    order: DataOrder
    # Started after the manifest is written.
    companions: Companions = field(default_factory=Companions)
    # Operations without a deterministic implementation, if DETERMINISTIC is warn.
    warned: WarnedOperations | None = None
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
            assert isinstance(self.model, Recomputing)
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
