"""A short run of the real trainer, in its own directory.

B micro-batch, T tokens.
"""

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpt2.check.context import CheckContext
from gpt2.config import Config
from gpt2.evaluate import Evaluator
from gpt2.training import loop
from gpt2.training.loop import open_session, train_step
from gpt2.training.metrics import MetricsLog
from gpt2.training.records import RecordWriter
from gpt2.training.state import (
    MicroBatch,
    StepMetrics,
    TrainingSession,
    TrainState,
)
from lib.optim.spam import Adamwspam
from lib.pruning.pruners import MaskPruner
from lib.runs.run_dir import RunDir

# Elements per chunk of optimizer and pruner, so that a matrix has several, as at full size.
_RUN_CHUNK = 1 << 14


def compute_in_chunks(state: TrainState, elements: int) -> None:
    """Let optimizer and pruner of a small form compute in chunks of so many elements."""
    for part in (state.optimizer, state.pruner):
        if isinstance(part, (Adamwspam, MaskPruner)):
            part.chunk_elements = elements


class LossRecorder(MetricsLog):
    """The trainer's log, which also records losses and the gradient norm."""

    def __init__(self, session: TrainingSession) -> None:
        super().__init__(session)
        self.losses: list[float] = []
        self.gradient_norm = 0.0

    def add(self, measured: StepMetrics, lr: float) -> None:
        """Record the loss of a step, and the gradient norm before clipping."""
        self.losses.append(measured.loss.item())
        self.gradient_norm = measured.gradient_norm.item()


class ShortRun:
    """An open training session; ``build_dir`` contains the data, ``folder`` the run."""

    def __init__(self, config: Config, build_dir: Path, folder: Path) -> None:
        self._records = RecordWriter(RunDir(folder), lambda event: None)
        self.session = open_session(config, build_dir, self._records)
        compute_in_chunks(self.session, _RUN_CHUNK)
        self._log = LossRecorder(self.session)
        self._batches: Iterator[list[MicroBatch]] | None = None

    @property
    def losses(self) -> list[float]:
        """Return the loss of every step so far, in nats."""
        return self._log.losses

    @property
    def gradient_norm(self) -> float:
        """Return the gradient norm of the last step, before clipping."""
        return self._log.gradient_norm

    def step(self, micro_batches: list[MicroBatch] | None = None) -> float:
        """Run the trainer's next step and return its loss.

        The step uses the run's own data unless ``micro_batches`` are given.
        """
        if micro_batches is None:
            # Start at the session's current iteration, which a resume may have changed.
            if self._batches is None:
                self._batches = self.session.batches()
            micro_batches = next(self._batches)
        train_step(self.session, micro_batches, self._log)
        return self.losses[-1]

    def digest(self) -> str:
        """Return the SHA-256 of the bytes of all weights (hex)."""
        sha256 = hashlib.sha256()
        for name, weight in self.session.weights().items():
            sha256.update(name.encode())
            sha256.update(weight.flatten().view(torch.uint8).numpy().tobytes())
        return sha256.hexdigest()

    @torch.no_grad()
    def logits(self, idx_BT: Tensor) -> Tensor:
        """Return logits without dropout; the model is in training mode afterwards."""
        self.session.model.eval()
        logits: Tensor = self.session.model(idx_BT)
        self.session.model.train()
        return logits

    def close(self) -> None:
        """Close the run's files."""
        self._records.close()


# One instrumented short training run of a step, shared by several checks.


# Steps after which every parameter must have received a gradient.
GRADIENT_STEPS = 3
CHECKPOINT_STEP = 3
# Steps of the last evaluation and the last statistics in the checkpoint.
RECORDED_STEPS = (2, 3)


@dataclass(frozen=True)
class PrunedStep:
    """Prunable matrices after the pruning of one step, by name."""

    # Masks of remaining weights, and names of matrices whose pruned weights have a nonzero value, a
    # nonzero gradient in this step, or a nonzero state of the optimizer.
    masks: dict[str, Tensor]
    nonzero: dict[str, set[str]]
    # Number of zeros in each row of the weights.
    zeros: dict[str, Tensor]


class TracedRun:
    """Training of the whole budget of ``config``, with a checkpoint two steps before the end."""

    def __init__(self, config: Config, context: CheckContext) -> None:
        self.config = config
        self.folder = context.new_run_dir()
        self.run = ShortRun(config, context.prepare_data(config), self.folder)
        session = self.run.session
        # State of the generator that dropout draws from, before the first step.
        self.dropout_start = torch.get_rng_state()
        self.initial_weights = {name: w.clone() for name, w in session.weights().items()}
        # Weights after the watched steps, and names of parameters with gradients in these steps.
        self.weights_after_gradient_steps: dict[str, Tensor] = {}
        self.with_gradient: set[str] = set()
        self.nonfinite: set[str] = set()
        # Sparsity after each step.
        self.sparsity: list[float] = []
        self.pruned_steps: list[PrunedStep] = []
        # Matrices whose pruned weights have a nonzero gradient in the current step.
        self._nonzero_gradients: set[str] = set()
        hooks = [self._watch(name, p) for name, p in session.model.named_parameters()]
        # Every optimizer extends one of torch's, whose hooks the protocol does not declare.
        optimizer = cast(torch.optim.Optimizer, session.optimizer)
        optimizer.register_step_pre_hook(self._record_pruned_gradients)
        for i in range(1, session.budget.iterations + 1):
            self.run.step()
            session.records.metrics(kind="check", iteration=i)
            self.sparsity.append(session.pruner.sparsity())
            self._record_pruning()
            if i == GRADIENT_STEPS:
                for hook in hooks:
                    hook.remove()
                self.weights_after_gradient_steps = {
                    name: w.clone() for name, w in session.weights().items()
                }
            if i == CHECKPOINT_STEP:
                session.evaluated_at, session.statistics_at = RECORDED_STEPS
                loop.save_checkpoint(session)
        self.losses = list(self.run.losses)
        self.digest = self.run.digest()
        self.data_order = session.order.state_dict()
        self.final_weights = {name: w.clone() for name, w in session.weights().items()}

    def _watch(self, name: str, parameter: nn.Parameter) -> Any:
        """Record whether the parameter gets a nonzero gradient."""

        def record(gradient: Tensor) -> None:
            # One pass without a temporary tensor; NaN and infinity propagate.
            size = torch.linalg.vector_norm(gradient, ord=1).item()
            if not math.isfinite(size):
                self.nonfinite.add(name)
            elif size:
                self.with_gradient.add(name)

        return parameter.register_hook(record)

    def _record_pruned_gradients(self, optimizer: Any, arguments: Any, named: Any) -> None:
        """Record which pruned weights have a gradient in an optimizer step."""
        pruner = self.run.session.pruner
        if isinstance(pruner, MaskPruner):
            parameters = dict(self.run.session.model.named_parameters())
            gradients = {name: parameters[name].grad for name in pruner.masks}
            self._nonzero_gradients = _nonzero(gradients, pruner)

    def _record_pruning(self) -> None:
        """Record the result of the pruner's step."""
        state = self.run.session
        if not isinstance(state.pruner, MaskPruner):
            return
        parameters = dict(state.model.named_parameters())
        weights = {name: parameters[name].detach() for name in state.pruner.masks}
        nonzero = {
            "value": _nonzero(weights, state.pruner),
            "gradient": self._nonzero_gradients,
            "optimizer state": set().union(
                *(
                    _nonzero({name: tensor}, state.pruner)
                    for name, weight in weights.items()
                    for tensor in state.optimizer.state.get(parameters[name], {}).values()
                    if tensor is not None and tensor.shape == weight.shape
                )
            ),
        }
        masks = {name: mask.clone() for name, mask in state.pruner.masks.items()}
        zeros = {name: (weight == 0).sum(1) for name, weight in weights.items()}
        self.pruned_steps.append(PrunedStep(masks, nonzero, zeros))


def _nonzero(tensors: Mapping[str, Tensor | None], pruner: MaskPruner) -> set[str]:
    """Return the names of tensors that are nonzero at a pruned weight."""
    return {
        name
        for name, tensor in tensors.items()
        if tensor is not None and bool(tensor.masked_fill(pruner.masks[name], 0.0).any())
    }


def in_batches_of(rows: int, evaluate: Evaluator) -> Evaluator:
    """Return a copy of the evaluation with other batches: all windows at once take the least time."""
    other = copy.copy(evaluate)
    other.batch_size = rows
    return other
