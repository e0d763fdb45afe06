"""A short run of the real trainer, in its own directory.

B micro-batch, T tokens.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpt2 import train
from gpt2.check.context import CheckContext
from gpt2.config import Config
from gpt2.train import train_step
from gpt2.training.metrics import MetricsLog
from gpt2.training.records import RecordWriter
from gpt2.training.session import MicroBatch, StepMetrics, TrainingSession
from gpt2.training.setup import open_session
from lib.pruning.reference import PruningSnapshot
from lib.runs.run_dir import RunDir


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
        for name, weight in self.session.state.weights().items():
            sha256.update(name.encode())
            sha256.update(weight.flatten().view(torch.uint8).numpy().tobytes())
        return sha256.hexdigest()

    @torch.no_grad()
    def logits(self, idx_BT: Tensor) -> Tensor:
        """Return logits without dropout; the model is in training mode afterwards."""
        self.session.state.model.eval()
        logits: Tensor = self.session.state.model(idx_BT)
        self.session.state.model.train()
        return logits

    def close(self) -> None:
        """Close the run's files."""
        self._records.close()


# One instrumented short training run of a step, shared by several checks.


# Steps after which every parameter must have received a gradient.
GRADIENT_STEPS = 3
CHECKPOINT_STEP = 3
# One vector and one matrix that every model has.
TRACED_PARAMETERS = ("ln_f.weight", "h.0.attn.c_proj.weight")
# Elements of each followed tensor: enough to identify an algorithm, few enough for scalar formulas.
_MAX_ELEMENTS = 128


@dataclass(frozen=True)
class TracedUpdate:
    """Inputs of an optimizer step: learning rate, and gradients by name."""

    lr: float
    # Gradient norms before and after clipping.
    gradient_norm: Tensor
    clipped_norm: Tensor
    gradients: dict[str, Tensor]
    # Weights of the followed matrix before the step.
    weights: Tensor


class TracedRun:
    """Training of the whole budget of ``config``, with a checkpoint half way."""

    def __init__(self, config: Config, context: CheckContext) -> None:
        self.config = config
        self.folder = context.new_run_dir()
        self.run = ShortRun(config, context.prepare_data(config), self.folder)
        session = self.run.session
        # State of the generator that dropout draws from, before the first step.
        self.dropout_start = torch.get_rng_state()
        self.initial_weights = {name: w.clone() for name, w in session.state.weights().items()}
        # Weights after the watched steps, and names of parameters with gradients in these steps.
        self.weights_after_gradient_steps: dict[str, Tensor] = {}
        self.with_gradient: set[str] = set()
        self.nonfinite: set[str] = set()
        # Types of the outputs of the followed matrix.
        self.product_dtypes: set[torch.dtype] = set()
        # Sparsity after each step.
        self.sparsity: list[float] = []
        self.updates: list[TracedUpdate] = []
        # Inputs of the pruner for the matrix after each step, and the mask of remaining weights.
        self.pruner_inputs: list[PruningSnapshot] = []
        self.remaining_masks: list[list[bool]] = []
        hooks = [self._watch(name, p) for name, p in session.state.model.named_parameters()]
        product = session.state.model.get_submodule(TRACED_PARAMETERS[1].removesuffix(".weight"))
        hooks.append(product.register_forward_hook(self._record_product))
        # Every optimizer extends one of torch's, whose hooks the protocol does not declare.
        optimizer = cast(torch.optim.Optimizer, session.state.optimizer)
        optimizer.register_step_pre_hook(self._record_update)
        if config.pruning.name != "none":
            optimizer.register_step_post_hook(self._record_pruner_inputs)
        for i in range(1, session.state.budget.iterations + 1):
            self.run.step()
            self.sparsity.append(session.state.pruner.sparsity())
            self.remaining_masks.append([w != 0.0 for w in first_elements(self._matrix)])
            if i == GRADIENT_STEPS:
                for hook in hooks:
                    hook.remove()
                self.weights_after_gradient_steps = {
                    name: w.clone() for name, w in session.state.weights().items()
                }
            if i == CHECKPOINT_STEP:
                train.save_checkpoint(session)
        self.losses = list(self.run.losses)
        self.digest = self.run.digest()
        self.final_weights = {name: w.clone() for name, w in session.state.weights().items()}

    def _watch(self, name: str, parameter: nn.Parameter) -> Any:
        """Record whether the parameter gets a nonzero gradient."""

        def record(gradient: Tensor) -> None:
            if not bool(torch.isfinite(gradient).all()):
                self.nonfinite.add(name)
            elif bool(gradient.any()):
                self.with_gradient.add(name)

        return parameter.register_hook(record)

    def _record_product(
        self, module: nn.Module, inputs: tuple[Tensor, ...], product: Tensor
    ) -> None:
        self.product_dtypes.add(product.dtype)

    def _record_update(self, optimizer: Any, arguments: tuple[Any, ...], named: Any) -> None:
        """Record the inputs of an optimizer step, which may modify them.

        A step nested in another step passes no gradient norm and is skipped.
        """
        if "gradient_norm" not in named:
            return
        parameters = dict(self.run.session.state.model.named_parameters())
        gradients = {
            name: gradient.clone()
            for name in TRACED_PARAMETERS
            if (gradient := parameters[name].grad) is not None
        }
        lr, norm = optimizer.param_groups[0]["lr"], named["gradient_norm"].clone()
        all_gradients = [p.grad for p in parameters.values() if p.grad is not None]
        clipped = torch.nn.utils.get_total_norm(all_gradients)
        weights = parameters[TRACED_PARAMETERS[1]].detach().clone()
        self.updates.append(TracedUpdate(lr, norm, clipped, gradients, weights))

    @property
    def _matrix(self) -> Tensor:
        return self.run.session.state.weights()[TRACED_PARAMETERS[1]]

    def _record_pruner_inputs(self, optimizer: Any, arguments: tuple[Any, ...], named: Any) -> None:
        """Record the pruner's inputs, before its weights are set to zero."""
        if "gradient_norm" not in named:
            return
        parameter = dict(self.run.session.state.model.named_parameters())[TRACED_PARAMETERS[1]]
        state = optimizer.state[parameter]
        moments = [
            first_elements(state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state
        ]
        m, v = moments or ([], [])
        history = [
            (
                first_elements(update.gradients[TRACED_PARAMETERS[1]] * _unclipped(update)),
                first_elements(update.weights),
            )
            for update in self.updates
            if TRACED_PARAMETERS[1] in update.gradients
        ]
        correction = 1.0
        if moments:
            correction -= optimizer.param_groups[0]["betas"][0] ** state["step"].item()
        self.pruner_inputs.append(
            PruningSnapshot(first_elements(parameter), history, m, v, correction)
        )


def first_elements(tensor: Tensor) -> list[float]:
    """Return the elements of a followed tensor that are recomputed."""
    numbers: list[float] = tensor.flatten()[:_MAX_ELEMENTS].tolist()
    return numbers


def _unclipped(update: TracedUpdate) -> Tensor:
    return update.gradient_norm / update.clipped_norm
