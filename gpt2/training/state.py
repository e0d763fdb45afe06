"""Training state: everything that a checkpoint carries.

Shape suffixes: R ranks, S steps, B sequences of one rank and step.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpt2.data.sampler import EMPTY_ORDER_DIGEST, extend_order_digest
from gpt2.model import GPT
from gpt2.training.budget import TrainingBudget, TrainingClock
from lib.env.observe import NondeterministicOperations
from lib.env.process_group import ProcessGroup
from lib.env.sharded import placed_like, whole_copy
from lib.optim.optimizers import Optimizer
from lib.pruning.pruners import Pruner
from lib.runs.rng import rng_state, set_rng_state

# Steps buffered per rank before their offsets are gathered.
_STEPS_PER_EXCHANGE = 64


class DataOrder:
    """Running digest of the data order, independent of the number of ranks and workers, and of resumes."""

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


class RankGenerators:
    """Random generators of this process, saved with those of all other ranks."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def state_dict(self) -> dict[str, Any]:
        """Return the generator states; those that differ per rank are gathered [R, bytes]."""
        state = rng_state(self._device)
        return state | {
            name: self._group.gather(state[name]) for name in _PER_RANK_GENERATORS & state.keys()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators; a rank missing in the saved run keeps its seeded stream."""
        if self._group.rank < len(state["torch"]):
            # Clone: torch misreads a row view of a larger tensor, and crashes.
            names = _PER_RANK_GENERATORS & state.keys()
            rank_state = {name: state[name][self._group.rank].clone() for name in names}
            set_rng_state(state | rank_state, self._device)


# The first step allocates the optimizer's state, so the second step has the peak memory.
STEPS_TO_PROBE = 2


@dataclass
class TrainState:
    """Model, optimizer, schedules, generators and progress of a run."""

    model: GPT
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    pruner: Pruner
    budget: TrainingBudget
    clock: TrainingClock
    order: DataOrder
    generators: RankGenerators
    # The modules without weights, if the parameters are sharded.
    blank: GPT | None = None
    # Operations without a deterministic implementation, if DETERMINISTIC is warn.
    nondeterministic_ops: NondeterministicOperations | None = None
    # Optimizer steps done.
    iteration: int = 0
    # Share of the budget used by those steps.
    progress: float = 0.0
    # Iterations of the last evaluation, statistics and checkpoint.
    evaluated_at: int = 0
    statistics_at: int = 0
    saved_at: int = 0
    # Out-of-memory fallbacks in order: the manifest's ``oom_fallbacks``.
    oom_fallbacks: list[dict[str, Any]] = field(default_factory=list)
    # Divisions of a batch with which the first iterations were trained, if not as configured.
    earlier_divisions: list[dict[str, Any]] = field(default_factory=list)
    # Remaining steps whose memory is probed before a step of several ranks; not saved.
    steps_to_probe: int = STEPS_TO_PROBE

    @property
    def tokens(self) -> int:
        """Return the number of training tokens consumed."""
        return self.iteration * self.budget.tokens_per_iteration

    def weights(self) -> dict[str, Tensor]:
        """Return every weight under its first name, possibly sharded; a tied matrix appears once."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def whole_model(self) -> GPT:
        """Return the model, or a copy with all weights on this rank if they are sharded.

        Must be called on every rank. The copy can be used on one rank alone.
        """
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, except the weights. Must be called on every rank.

        Moments and masks of sharded parameters are sharded.
        """
        return {
            "iteration": self.iteration,
            "progress": self.progress,
            "evaluated_at": self.evaluated_at,
            "told_at": self.statistics_at,
            "train_seconds": self.clock.seconds,
            "budget": self.budget.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "pruner": self.pruner.state_dict(),
            "data_order": self.order.state_dict(),
            "rng": self.generators.state_dict(),
            "oom_fallbacks": self.oom_fallbacks,
            "earlier_divisions": self.earlier_divisions,
            "warned": self.nondeterministic_ops.names if self.nondeterministic_ops else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``, except the weights and the out-of-memory fallbacks."""
        self.iteration = state["iteration"]
        self.progress = state["progress"]
        self.evaluated_at = state["evaluated_at"]
        self.statistics_at = state["told_at"]
        self.clock.resume_at(state["train_seconds"])
        self.budget.load_state_dict(state["budget"])
        self.optimizer.load_state_dict(self._placed(state["optimizer"]))
        # Without fp16 the scaler has no state and rejects an empty one.
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.pruner.load_state_dict(state["pruner"])
        self.order.load_state_dict(state["data_order"])
        self.generators.load_state_dict(state["rng"])
        self.earlier_divisions = state.get("earlier_divisions", [])
        if self.nondeterministic_ops:
            self.nondeterministic_ops.add(state["warned"])

    def take_moments(self, saved: dict[str, Any]) -> list[str]:
        """Take the moments of an optimizer of the same kind, by the names of the parameters.

        ``saved`` is its state. The options remain those of this optimizer. Return the names of the
        parameters without moments.
        """
        moments = {
            name: saved["state"][index]
            for group in saved["param_groups"]
            for index, name in zip(group["params"], group["param_names"], strict=True)
            if index in saved["state"]
        }
        own = self.optimizer.state_dict()
        names = {
            index: name
            for group in own["param_groups"]
            for index, name in zip(group["params"], group["param_names"], strict=True)
        }
        state = {index: moments[name] for index, name in names.items() if name in moments}
        self.optimizer.load_state_dict(self._placed({**own, "state": state}))
        return [name for name in names.values() if name not in moments]

    def _placed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the optimizer with each moment placed like its parameter."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        moments = {
            index: {
                key: (
                    placed_like(value, parameters[index])
                    if isinstance(value, Tensor) and value.shape == parameters[index].shape
                    else value
                )
                for key, value in values.items()
            }
            for index, values in state["state"].items()
        }
        return state | {"state": moments}
