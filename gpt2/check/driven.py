"""The trainer's loop on a few parameters in float64, with prescribed gradients and a controlled clock.

A driven run has the optimizer, pruner, schedule and kind of budget of a step, evaluations, and a resume.
Every part of the rules acts within its steps.
"""

import copy
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpt2.check.short_run import compute_in_chunks
from gpt2.check.shrink import with_changes, with_scaled_floats
from gpt2.config import Config
from gpt2.evaluate import DocumentLoss, EvaluationResult, Evaluator
from gpt2.model import GPT
from gpt2.training import loop
from gpt2.training.budget import TrainingBudget, TrainingClock
from gpt2.training.records import RecordWriter, StopCondition
from gpt2.training.state import DataOrder, TrainingSession, build_state
from lib.config.field import SymbolValue
from lib.optim.options import AdamwspamOptions
from lib.pruning.layers import NeverPruned, PaddedEmbedding, StackedLinear
from lib.pruning.pruners import MaskPruner

Weights = dict[str, list[float]]
# Optimizer steps of a budget without a stretch; the budgets end inside the last one.
STEPS = 26
# The run is resumed after this step: in a warm-up after a reset, and between two prunings.
RESUMED_AFTER = 12
# A run whose budget never ends is stopped.
_MAX_STEPS = 100
# Seconds of the clock for a forward pass, of which a step has two, and for an evaluation.
PASS_SECONDS = 0.51
_EVALUATION_SECONDS = 1000.0
# Tokens and loss of each evaluation, which has one correct prediction.
EVALUATED, EVALUATED_LOSS = 4, 1.5
EVAL_INTERVAL = 2
_SEQUENCES = 4
_SETTINGS: dict[str, SymbolValue] = {
    "GLOBAL_BATCH": _SEQUENCES,
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 2,
    "EVAL_INTERVAL": EVAL_INTERVAL,
    "LOG_INTERVAL": 1000,
    "FIRST_STEPS": 0,
    "STATISTICS_INTERVAL": 0,
    "WARMUP_STEPS": 2,
    "MAX_ITERS": STEPS,
    "GPT2_MAX_TIME": STEPS,
}
# Intervals of the rules, at most: there are several resets with a warm-up of several steps.
_INTERVALS = {
    "SPAM_INTERVAL": 8,
    "SPAM_WARMUP_STEPS": 6,
    "SPAM_CLIP_DELAY": 3,
    "SPAM_SPIKE_WINDOW": 4,
    "PRUNING_FREQUENCY": 7,
    "MUON_STEPS": 3,
}
# Floats of every optimizer and schedule, and the factor of their other values.
_RATES = ("LEARNING_RATE", "MIN_LEARNING_RATE", "GRAD_CLIP", "WEIGHT_DECAY", "SGD_MOMENTUM")
_ADAM = ("ADAM_BETA1", "ADAM_BETA2", "ADAM_EPS")
_SCALED = (*_RATES, *_ADAM, "MUON_LEARNING_RATE", "MUON_MOMENTUM")
_SCALE = 0.97
# Elements per chunk of optimizer and pruner: a matrix has several, as at full size.
_CHUNK = 7
# Steps whose gradients are all larger: a spike at the first full window, and one that is a spike
# only if the window does not reach back to it.
_NORM_SPIKES = {5: 1.0, 10: 0.6}
# Steps with a norm at a share of the way from the mean of the last ones to the limit of a spike: just
# above, where a standard deviation of a sample or a multiple of the mean would have a higher limit,
# and below. The last ones are small: a large norm in the window would raise the limit.
_AT_LIMIT = {24: 1.07, 26: 0.5}
# Steps with one large element: before and from SPAM_CLIP_DELAY on, at the start and after resets.
_ELEMENT_SPIKES = {2: 0, 3: 5, 11: 2, 18: 7}
# Steps whose gradient norm is above GRAD_CLIP.
CLIPPED_STEPS = (14, 19)
_ABOVE_CLIP = 3.0
_TINY = 1e-5


class _Gate(NeverPruned):
    """A matrix that decays, and is never pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, 4))


class DrivenModel(nn.Module):
    """A few parameters of every kind; the loss is linear, with given gradients."""

    def __init__(self) -> None:
        super().__init__()
        # The constructors draw values that are replaced.
        with torch.random.fork_rng(devices=[]):
            self.wte = PaddedEmbedding(4, 3, used_rows=3)
            self.first = StackedLinear(4, (2, 3), bias=True)
            self.second = nn.Linear(3, 4, bias=False)
            self.gate = _Gate()
            self.ln = nn.LayerNorm(3)
        self.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)
            self.wte.weight[self.wte.used_rows :] = 0.0
        self.gradients: dict[str, Tensor] = {}
        # Input tokens of all forward passes.
        self.tokens = 0

    def forward(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Return the inner product of parameters and their gradients."""
        self.tokens += x_BT.numel()
        products = [(p * self.gradients[n]).sum() for n, p in self.named_parameters()]
        return torch.stack(products).sum()


def driven_config(small: Config, configured: Config) -> Config:
    """Return the small form for a driven run: the configured rules, with shortened intervals."""
    limits = {
        name: min(value, most)
        for name, most in _INTERVALS.items()
        if isinstance(value := configured.values.get(name), int) and value
    }
    tokens = _SEQUENCES * small.model.shape.block_size
    kind = str(configured.values["BUDGET"])
    budget: dict[str, SymbolValue] = {"BUDGET": kind, "MAX_TOKENS": STEPS * tokens - tokens // 2}
    # Without it, steps with different models are driven alike, and once.
    if kind == "flops":
        budget["MAX_FLOPS"] = str((STEPS - 0.5) * tokens * small.model.flops_per_token())
    driven = with_changes(small, **(_SETTINGS | budget | limits))
    # Other values than in any configuration, so that a constant in the code cannot pass for one.
    return with_scaled_floats(driven, _SCALED, _SCALE)


class DrivenRun:
    """What the run did: weights and scores after each step, and the rows of its records."""

    def __init__(self, template: TrainingSession, config: Config) -> None:
        self.config, self.model = config, DrivenModel()
        self.start = _flat(dict(self.model.named_parameters()))
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: list[Weights] = []
        # Of prunable matrices: the scores, and those whose pruned weights have a state of the optimizer.
        self.scores: list[Weights] = []
        self.stateful: list[set[str]] = []
        # Metrics by kind: train and eval.
        self.rows: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
        self._seconds = 0.0
        self._driving = _driving_gradients(config)
        interrupted = self._trained(template, RESUMED_AFTER)
        resumed = self._trained(template, _MAX_STEPS, interrupted)
        self.tokens = self.rows["train"][-1]["tokens"], resumed.tokens
        self.consumed = sum(
            cast(DrivenModel, session.model).tokens for session in (interrupted, resumed)
        )

    def _trained(
        self, template: TrainingSession, limit: int, before: TrainingSession | None = None
    ) -> TrainingSession:
        """Return a session that was trained to its end or to ``limit`` steps, from ``before``."""
        session = self._session(template)
        model = cast(DrivenModel, session.model)
        model.register_forward_hook(lambda *given: self._pass_time(PASS_SECONDS))
        if before:
            # As a checkpoint restores it.
            state = copy.deepcopy(before.state_dict())
            session.load_weights(before.weights())
            session.load_state_dict(state)

        def stop() -> bool:
            """Record the last step, and prescribe the gradients of the next one."""
            step, pruner = session.iteration, session.pruner
            if step > len(self.weights):
                self.weights.append(_flat(session.weights()))
                if isinstance(pruner, MaskPruner):
                    names, optimizer = pruner.masks, session.optimizer
                    self.scores.append(_flat({n: pruner.score(n, optimizer) for n in names}))
                    self.stateful.append(_stateful(session, pruner))
            while len(self.gradients) <= step:
                self.gradients.append(next(self._driving))
            model.gradients = self.gradients[step]
            return step >= limit

        loop.train(session, StopCondition(stop, 0))
        return session

    def _session(self, template: TrainingSession) -> TrainingSession:
        state = build_state(self.config, cast(GPT, DrivenModel()), template.group)
        compute_in_chunks(state, _CHUNK)
        shared = ("run", "dataset", "tokenizer", "origin", "init_digests")
        return TrainingSession(
            **vars(state),
            **{name: vars(template)[name] for name in shared},
            evaluate=cast(Evaluator, self._evaluated),
            records=_Rows(template, self.rows),
            budget=TrainingBudget(self.config),
            clock=TrainingClock(lambda: self._seconds),
            order=DataOrder(template.group),
        )

    def _evaluated(self, *given: Any) -> EvaluationResult:
        self._pass_time(_EVALUATION_SECONDS)
        return EvaluationResult((DocumentLoss(0, EVALUATED, 1, EVALUATED * EVALUATED_LOSS),))

    def _pass_time(self, seconds: float) -> None:
        self._seconds += seconds


class _Rows(RecordWriter):
    """Records that are kept in memory, by their kind."""

    def __init__(self, template: TrainingSession, rows: dict[str, list[dict[str, Any]]]) -> None:
        super().__init__(template.run, opened=False)
        self._rows = rows

    def metrics(self, **record: Any) -> None:
        """Keep the row."""
        self._rows[record["kind"]].append(record)


def _stateful(session: TrainingSession, pruner: MaskPruner) -> set[str]:
    """Return the names of matrices whose pruned weights have a nonzero state of the optimizer."""
    parameters = dict(session.model.named_parameters())
    return {
        name
        for name, mask in pruner.masks.items()
        for value in session.optimizer.state.get(parameters[name], {}).values()
        if value is not None and value.shape == mask.shape and value.masked_fill(mask, 0.0).any()
    }


def _flat(tensors: dict[str, Tensor]) -> Weights:
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def _driving_gradients(config: Config) -> Iterator[dict[str, Tensor]]:
    """Yield gradients that activate every part of the configured rule.

    Large elements exceed what ``SPAM_THETA`` allows while the norm is below ``GRAD_CLIP``, and
    large norms exceed ``SPAM_SPIKE_THRESHOLD``.
    """
    rule, clip, model = config.optimizer.rule, config.train.grad_clip, DrivenModel()
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
