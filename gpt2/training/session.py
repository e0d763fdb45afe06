"""Everything a training run works with, and what of it a checkpoint carries."""

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

# Generators that dropout draws from.
_PER_RANK = {"torch", "cuda"}
# The optimizer's state is made in the first step, so the second one needs the most memory.
_UNPROVED = 2


@runtime_checkable
class Recomputing(Protocol):
    """A model that can compute its blocks again in the backward pass instead of keeping them."""

    grad_checkpointing: bool


@dataclass
class Session:
    """One run, as one of its processes sees it. Mutable state is in the parts and in the last four fields."""

    run: RunDir
    config: Config
    group: Group
    device: torch.device
    dataset: Dataset
    tokenizer: Tokenizer
    model: GPT
    # The model, or what torch.compile made of it; its gradients are shared among the processes.
    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    pruner: Pruner
    budget: Budget
    watch: Stopwatch
    evaluate: Evaluator
    records: Records
    heartbeat: Heartbeat
    # Code and machine that the run was started with; a checkpoint says which made it.
    origin: dict[str, Any]
    # SHA-256 of the first weights of each rank: all the same.
    init_digests: list[str]
    order: DataOrder
    # Opened once the manifest is written.
    companions: Companions = field(default_factory=Companions)
    # Where DETERMINISTIC is warn: what had no deterministic form.
    warned: WarnedOperations | None = None
    # Optimizer steps done.
    iteration: int = 0
    # Part of the budget used by them.
    progress: float = 0.0
    # Iterations of the last evaluation, statistics and checkpoint.
    evaluated_at: int = 0
    told_at: int = 0
    saved_at: int = 0
    # What was given up because memory ran out, in order: the manifest's ``oom_fallbacks``.
    oom_fallbacks: list[dict[str, Any]] = field(default_factory=list)
    # Steps to come of which several ranks do not know yet whether they fit on all of them.
    unproved: int = _UNPROVED

    @property
    def label(self) -> str:
        """How the run is called in a line: the name of its directory."""
        return self.run.path.name

    @property
    def tokens(self) -> int:
        """Training tokens seen."""
        return self.iteration * self.budget.tokens_per_iteration

    def weights(self) -> dict[str, Tensor]:
        """Every weight under its first name; a tied matrix appears once."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def batches(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """This process's micro-batches, a list for each step from ``iteration`` on.

        ``order`` is told of each that is handed out.
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
        """Go on as ``record["to"]`` says; ``config`` then has the new micro-batch."""
        to = record["to"]
        self.oom_fallbacks = [*self.oom_fallbacks, record]
        self.unproved = _UNPROVED
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
        """All but the weights that an uninterrupted continuation needs. Every rank has to call it."""
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
        """Continue from ``state``; the weights are loaded apart."""
        self.iteration = state["iteration"]
        self.progress = state["progress"]
        self.evaluated_at = state["evaluated_at"]
        self.told_at = state["told_at"]
        self.watch.resume_at(state["train_seconds"])
        self.budget.load_state_dict(state["budget"])
        self.optimizer.load_state_dict(state["optimizer"])
        # The scaler of a run without fp16 has no state, and refuses an empty one.
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
        """Copy ``weights`` into the model, in place: optimizer and compiled code keep their hold."""
        parameters = dict(self.model.named_parameters())
        assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])

    def _rng_of_all_ranks(self) -> dict[str, Any]:
        """The generators of this process; of those that differ from rank to rank, all: [R, bytes]."""
        state = rng_state(self.device)
        return state | {name: self.group.gather(state[name]) for name in _PER_RANK & state.keys()}

    def _set_rng(self, state: dict[str, Any]) -> None:
        """A rank that the saved run did not have keeps the stream that it was seeded with."""
        if self.group.rank < len(state["torch"]):
            # A copy: torch reads a row of a larger tensor from the wrong place, and crashes.
            own = {n: state[n][self.group.rank].clone() for n in _PER_RANK & state.keys()}
            set_rng_state(state | own, self.device)
