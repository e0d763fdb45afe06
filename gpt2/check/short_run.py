"""A short run of the real trainer, in its own directory.

B micro-batch, T tokens.
"""

import copy
import hashlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpt2.check.context import CheckContext
from gpt2.check.shrink import with_changes, with_scaled_floats
from gpt2.config import Config
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.training import loop
from gpt2.training.budget import TrainingClock, run_budget
from gpt2.training.loop import open_session, train_step
from gpt2.training.metrics import MetricsLog
from gpt2.training.records import RecordWriter
from gpt2.training.state import (
    DataOrder,
    MicroBatch,
    RankGenerators,
    StepMetrics,
    TrainingSession,
    TrainState,
    build_state,
)
from lib.optim.options import AdamwspamOptions
from lib.optim.spam import Adamwspam
from lib.pruning.layers import NeverPruned, PaddedEmbedding
from lib.pruning.pruners import MaskPruner, Pruner
from lib.runs.run_dir import RunDir

# Elements per chunk of optimizer and pruner, so that a matrix has several, as at full size.
_RUN_CHUNK = 1 << 14
_DRIVEN_CHUNK = 7


def _divide(state: TrainState, elements: int) -> None:
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
        _divide(self.session, _RUN_CHUNK)
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


# A run of the trainer with given gradients, on a model of a few parameters.


class _Gate(NeverPruned):
    """A matrix that decays, and is never pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, 4))


class DrivenModel(nn.Module):
    """A few parameters of every kind, in float64; the loss is linear, with given gradients."""

    def __init__(self) -> None:
        super().__init__()
        # The constructors draw values that are replaced.
        with torch.random.fork_rng(devices=[]):
            self.wte = PaddedEmbedding(4, 3, used_rows=3)
            self.first = nn.Linear(4, 5)
            self.second = nn.Linear(3, 4, bias=False)
            self.gate = _Gate()
            self.ln = nn.LayerNorm(3)
        self.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                )
            self.wte.weight[self.wte.used_rows :] = 0.0
        self.gradients = {n: torch.zeros_like(p) for n, p in self.named_parameters()}
        # Input tokens of all forward passes.
        self.tokens = 0

    def forward(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Return the inner product of parameters and their gradients."""
        self.tokens += x_BT.numel()
        products = [(p * self.gradients[n]).sum() for n, p in self.named_parameters()]
        return torch.stack(products).sum()


class DrivenRun:
    """The trainer on a DrivenModel: optimizer, pruner, schedule and budget of ``config``."""

    def __init__(
        self,
        template: TrainingSession,
        config: Config,
        *,
        prunes: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = DrivenModel()
        cpu = torch.device("cpu")
        state = build_state(config, cast(GPT, self.model), template.group, cpu)
        if not prunes:
            state.pruner = Pruner()
        _divide(state, _DRIVEN_CHUNK)
        shared = ("run", "dataset", "tokenizer", "evaluate", "heartbeat", "origin", "init_digests")
        self.session = TrainingSession(
            **vars(state),
            **{name: vars(template)[name] for name in shared},
            records=RecordWriter(template.run, opened=False),
            budget=run_budget(config),
            clock=TrainingClock(clock),
            order=DataOrder(template.group),
            generators=RankGenerators(template.group, cpu),
        )
        self._log = LossRecorder(self.session)
        self._batch = (torch.zeros(1, 1, dtype=torch.long),) * 2

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Run the trainer's step of two micro-batches, with ``gradients`` of the mean loss."""
        self.model.gradients = dict(gradients)
        self.session.order.offered(torch.zeros(1, dtype=torch.long))
        train_step(self.session, [self._batch, self._batch], self._log)

    def resume_from(self, other: "DrivenRun") -> None:
        """Continue from another run's state, as a checkpoint restores it."""
        state = copy.deepcopy(other.session.state_dict())
        self.session.load_weights(other.session.weights())
        self.session.load_state_dict({**state, "oom_fallbacks": []})

    def weights(self) -> dict[str, list[float]]:
        """Return the flat values of every parameter."""
        return {n: w.flatten().tolist() for n, w in self.session.weights().items()}


# Intervals of the rules, at most: a driven run has several resets with a warm-up of several steps.
_STEPS = 26
_INTERVALS = {
    "SPAM_INTERVAL": 8,
    "SPAM_WARMUP_STEPS": 6,
    "SPAM_CLIP_DELAY": 3,
    "SPAM_SPIKE_WINDOW": 4,
    "PRUNING_FREQUENCY": 7,
}
# Floats of every optimizer and schedule, and the factor of their other values.
_SCALED = {"LEARNING_RATE", "MIN_LEARNING_RATE", "GRAD_CLIP", "WEIGHT_DECAY", "SGD_MOMENTUM"} | {
    "ADAM_BETA1",
    "ADAM_BETA2",
    "ADAM_EPS",
}
_SCALE = 0.97
# Steps whose gradients are all larger: a spike at the first full window, and one that is a spike
# only if the window does not reach back to it.
_NORM_SPIKES = {5: 1.0, 10: 0.6}
# Step with a norm a little above the last ones, by more than a few standard deviations.
_SMALL_SPIKE = 24
# Steps with a norm at a share of the way from the mean of the last ones to the limit of a spike: just
# above, where a standard deviation of a sample would have a higher limit, and below.
_AT_LIMIT = {22: 1.07, 26: 0.5}
# Steps with one large element: before and from SPAM_CLIP_DELAY on, at the start and after resets.
_ELEMENT_SPIKES = {2: 0, 3: 5, 11: 2, 18: 7}
# Steps whose gradient norm is above GRAD_CLIP.
CLIPPED_STEPS = (14, 19)
_ABOVE_CLIP = 3.0
_TINY = 1e-5


def driven_config(small: Config, configured: Config) -> Config:
    """Return the small form for a driven run: the configured rules, with shortened intervals."""
    limits = {
        name: min(value, most)
        for name, most in _INTERVALS.items()
        if isinstance(value := configured.values.get(name), int) and value
    }
    driven = with_changes(small, MAX_ITERS=_STEPS, **limits)
    # Other values than in any configuration, so that a constant in the code cannot pass for one.
    return with_scaled_floats(driven, _SCALED & driven.values.keys(), _SCALE)


def driving_gradients(model: DrivenModel, rule: Any, clip: float) -> Iterator[dict[str, Tensor]]:
    """Yield gradients that activate every part of the configured rule.

    Large elements exceed what ``SPAM_THETA`` allows while the norm is below ``GRAD_CLIP``, and
    large norms exceed ``SPAM_SPIKE_THRESHOLD``.
    """
    theta, threshold, window = 50.0, 2.0, 4
    if isinstance(rule, AdamwspamOptions):
        theta, threshold, window = rule.theta, rule.spike_threshold, rule.spike_window
    element = 4.0 * math.sqrt(theta)
    norm = 4.0 * (1.0 + threshold) * (1.0 + element / 5.0)
    unit = (clip or 1.0) / (10.0 * element)
    generator = torch.Generator().manual_seed(1)
    norms: list[float] = []
    for step in itertools.count(1):
        gradients = {}
        for name, parameter in model.named_parameters():
            random = torch.rand((2, *parameter.shape), generator=generator, dtype=torch.float64)
            gradients[name] = (0.5 + random[0]) * (random[1] - 0.5).sign() * unit
            gradients[name] *= norm * _NORM_SPIKES[step] if step in _NORM_SPIKES else 1.0
            gradients[name] *= 1.3 + threshold / 4.0 if step == _SMALL_SPIKE else 1.0
        matrix = gradients["first.weight"].view(-1)
        matrix[-1] *= _TINY
        # An element without a gradient has no second moment yet, and is not clipped.
        matrix[-2] *= 0.0 if step < 4 else 1.0
        if step in _ELEMENT_SPIKES:
            matrix[_ELEMENT_SPIKES[step]] *= element
        # Padding rows have no gradient.
        gradients["wte.weight"][model.wte.used_rows :] = 0.0
        total = target = torch.nn.utils.get_total_norm(gradients.values()).item()
        if step in CLIPPED_STEPS and clip:
            target = _ABOVE_CLIP * clip
        margin = threshold * statistics.pstdev(norms[-window:] or [0.0])
        if step in _AT_LIMIT and margin:
            target = statistics.fmean(norms[-window:]) + margin * _AT_LIMIT[step]
        norms.append(target)
        yield {n: g * (target / total) for n, g in gradients.items()}
