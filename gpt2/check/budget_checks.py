"""The run trains what its budget says, and its schedule ends with the budget.

The configured budget is computed from the symbols' values. The trainer's loop is run on a model of
a few parameters with a budget of the same kind, a clock under control, evaluations and a resume.

B micro-batch, T tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from gpt2 import train
from gpt2.check.cases import CheckFinding
from gpt2.check.short_run import DrivenModel, DrivenRun
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.check.update_checks import reference_learning_rate
from gpt2.config import Config
from gpt2.evaluate import DocumentLoss, EvaluationResult, Evaluator
from gpt2.training.budget import run_budget
from gpt2.training.records import NullRecords, StopCondition
from lib.config.field import SymbolValue
from lib.pruning.options import StateOptions
from lib.pruning.reference import documented_stretch
from lib.runs.run_dir import RunDir

_TOLERANCE = 1e-9
# The loop on the small model: optimizer steps without a stretch, sequences and interruption.
_STEPS = 7
_BATCH: dict[str, SymbolValue] = {
    "GLOBAL_BATCH": 4,
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 2,
    "EVAL_INTERVAL": 2,
    "LOG_INTERVAL": 1000,
    "FIRST_STEPS": 0,
    "STATISTICS_INTERVAL": 0,
    "WARMUP_STEPS": 2,
}
_INTERRUPTED_AFTER = 3
# A run whose budget never ends is stopped.
_MAX_STEPS = 100
# Seconds of the clock for a forward pass, and for an evaluation.
_PASS_SECONDS = 0.5
_EVALUATION_SECONDS = 1000.0
# Tokens and loss of the evaluation, which has one correct prediction.
_EVALUATED, _EVALUATED_LOSS = 4, 1.5
# A budget of seconds that ends inside a step.
_MAX_SECONDS = 7
# Every element of a gradient of the loop's model.
_GRADIENT = 0.01


def check_budgeted(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the configured budget, and the trainer's loop with a small budget of the same kind."""
    small = subject.small_exact
    budget = (str(subject.config.values["BUDGET"]), _stretch(subject.config))
    length = small.model.shape.block_size
    key = ("loop", small.train, small.schedule, small.optimizer, length, *budget)
    trained = subject.context.once(key, lambda: _trained(subject, *budget))
    return [*_configured(subject.config), *trained]


def _configured(config: Config) -> list[CheckFinding]:
    """Check length, batch and schedule of the configured run against the symbols' values."""
    budget, values = run_budget(config), config.values
    tokens, iterations, seconds = _expected_budget(config)
    pairs = {
        "tokens-per-iteration": ("tokens per optimizer step", tokens, budget.tokens_per_iteration),
        "budget-iterations": ("optimizer steps", iterations, budget.iterations),
        "budget-seconds": ("seconds of training", seconds, budget.seconds),
    }
    for name, (what, expected, actual) in pairs.items():
        if not math.isclose(actual, expected, rel_tol=_TOLERANCE):
            source = f"BUDGET={values['BUDGET']} and the pruner's documented stretch"
            text = f"{expected:,.10g} {what} by {source}"
            return [CheckFinding(name, text, f"{actual:,.10g}")]
    if iterations:
        return _schedule(config, iterations)
    return []


def _expected_budget(config: Config) -> tuple[int, int, float]:
    """Return tokens per step, steps (0 if unknown) and seconds (0 if unlimited)."""
    values = config.values
    sequences = _number(values, "BATCH_SIZE") * _number(values, "GRAD_ACCUMULATION")
    sequences *= _number(values, "GPUS")
    tokens = sequences * _number(values, "BLOCK_SIZE")
    stretch = _stretch(config)
    match values["BUDGET"]:
        case "iterations":
            return tokens, round(_number(values, "MAX_ITERS") * stretch), 0.0
        case "tokens":
            # Rounded up to whole iterations.
            full, rest = divmod(_number(values, "MAX_TOKENS"), tokens)
            return tokens, round((full + (1 if rest else 0)) * stretch), 0.0
        case "flops":
            flops = tokens * config.model.flops_per_token()
            steps = math.ceil(float(str(values["MAX_FLOPS"])) / flops)
            return tokens, round(steps * stretch), 0.0
    return tokens, 0, _number(values, "GPT2_MAX_TIME") * stretch


def _stretch(config: Config) -> float:
    """Return the documented budget of the pruner as a multiple of the configured one."""
    options = config.pruning
    if isinstance(options, StateOptions) and config.values["ADAMWPRUNE_STRETCH"]:
        return documented_stretch(str(config.values["ADAMWPRUNE_VARIANT"]))
    return 1.0


def _schedule(config: Config, iterations: int) -> list[CheckFinding]:
    """Check the learning rate at the start, around the warm-up, in the middle and at the end."""
    budget, warmup = run_budget(config), config.schedule.warmup_steps
    steps = {0, warmup - 1, warmup, iterations // 2, iterations - 1, iterations}
    for step in sorted(step for step in steps if 0 <= step <= iterations):
        progress = budget.progress(step, 0.0)
        rate = train.learning_rate_at(config.schedule, step, progress, budget.warmup_progress)
        expected = _rate(config, step, iterations)
        if not math.isclose(rate, expected, rel_tol=_TOLERANCE, abs_tol=1e-15):
            text = f"a learning rate of {expected:g} after {step} of {iterations} steps"
            return [CheckFinding("schedule-end", text, f"{rate:g}")]
    return []


def _rate(config: Config, step: int, iterations: int) -> float:
    schedule = config.schedule
    if schedule.warmup_steps >= iterations and step >= schedule.warmup_steps:
        # A warm-up as long as the budget leaves no decay.
        return schedule.learning_rate if schedule.kind == "constant" else schedule.min_learning_rate
    return reference_learning_rate(schedule, step, iterations)


@dataclass
class _Clock:
    """A clock that the driven model and the evaluation advance."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class _TrainRows(NullRecords):
    """The records of training steps and evaluations."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def metrics(self, **record: Any) -> None:
        """Keep the row of a training step or an evaluation."""
        if record["kind"] == "train":
            self.rows.append(record)
        elif record["kind"] == "eval":
            self.evaluations.append(record)


@dataclass
class _Loop:
    """The trainer's loop over one or more processes of a run."""

    subject: StepUnderTest
    config: Config
    clock: _Clock = field(default_factory=_Clock)

    def train(self, earlier: DrivenRun | None = None, limit: int = _MAX_STEPS) -> DrivenRun:
        """Train until the budget is used or ``limit`` steps are done; return the process's run."""
        template = self.subject.traced_run.run.session
        run = DrivenRun(template, self.config, prunes=False, clock=self.clock)
        if earlier:
            run.resume_from(earlier)
        run.model.register_forward_hook(lambda *given: self._advance(_PASS_SECONDS))
        # Equal gradients: their norm is the same in every step.
        for gradient in run.model.gradients.values():
            gradient.fill_(_GRADIENT)
        run.session.evaluate = cast(Evaluator, self._evaluate)
        run.session.records = _TrainRows(template.run)
        reached = lambda: run.session.state.iteration >= limit  # noqa: E731
        train.train(run.session, StopCondition(reached, 0))
        return run

    def _advance(self, seconds: float) -> None:
        self.clock.now += seconds

    def _evaluate(self, *given: Any) -> EvaluationResult:
        self._advance(_EVALUATION_SECONDS)
        return EvaluationResult((DocumentLoss(0, _EVALUATED, 1, _EVALUATED * _EVALUATED_LOSS),))


def _trained(subject: StepUnderTest, kind: str, stretch: float) -> list[CheckFinding]:
    """Check steps, tokens, progress and learning rates of the trainer's loop, with a resume."""
    length = _number(subject.small_exact.values, "BLOCK_SIZE")
    tokens = 4 * length
    size: dict[str, SymbolValue] = {
        "MAX_ITERS": _STEPS,
        # Half a step more than the steps before the last one.
        "MAX_TOKENS": _STEPS * tokens - tokens // 2,
        "MAX_FLOPS": str((_STEPS - 0.5) * tokens * subject.small_exact.model.flops_per_token()),
        "GPT2_MAX_TIME": _MAX_SECONDS,
    }
    config = with_changes(subject.small_exact, BUDGET=kind, **(_BATCH | size))
    loop = _Loop(subject, config)
    first = loop.train(limit=_INTERRUPTED_AFTER)
    second = loop.train(first)
    rows = [row for run in (first, second) for row in cast(_TrainRows, run.session.records).rows]
    progress = _expected_progress(config, stretch)
    consumed = first.model.tokens + second.model.tokens
    what = f"with a budget of {kind}, evaluations and a resume"
    numbers = [row["iteration"] for row in rows]
    if numbers != list(range(1, len(progress) + 1)):
        return [CheckFinding("budget-steps", f"{len(progress)} steps {what}", f"{len(rows)} steps")]
    totals = (consumed, rows[-1]["tokens"], second.session.state.tokens)
    if set(totals) != {len(progress) * tokens}:
        text = f"{len(progress) * tokens} tokens {what}"
        found = "{} in the batches, {} in the last record".format(*totals)
        return [CheckFinding("budget-tokens", text, found)]
    evaluations = [
        row for run in (first, second) for row in cast(_TrainRows, run.session.records).evaluations
    ]
    findings = _rows(config, rows, progress) + _evaluations(evaluations, len(progress), tokens)
    return findings + _recorded_step(rows)


def _recorded_step(rows: list[dict[str, Any]]) -> list[CheckFinding]:
    """Check loss and gradient norm in the records of the first step, and the norm in the others."""
    weights = [weight for p in DrivenModel().parameters() for weight in p.flatten().tolist()]
    loss, norm = _GRADIENT * math.fsum(weights), _GRADIENT * math.sqrt(len(weights))
    norms = [row["grad_norm"] for row in rows]
    recorded = (rows[0]["loss"], max(norms), min(norms))
    if all(
        math.isclose(a, e, rel_tol=1e-5) for a, e in zip(recorded, (loss, norm, norm), strict=True)
    ):
        return []
    what = f"a loss of {loss:.6g} at step 1 and a gradient norm of {norm:.6g} in all steps"
    return [CheckFinding("step-record", what, f"{recorded}")]


def _evaluations(rows: list[dict[str, Any]], steps: int, tokens: int) -> list[CheckFinding]:
    """Check iteration, tokens and scores of the evaluations during training."""
    interval = int(str(_BATCH["EVAL_INTERVAL"]))
    expected = [(i, i * tokens) for i in range(interval, steps, interval)]
    actual = [(row["iteration"], row["tokens"]) for row in rows]
    if actual != expected:
        what = f"evaluations at (iteration, tokens) {expected}"
        return [CheckFinding("evaluation-position", what, f"{actual}")]
    scores = {(row["val_loss"], row["token_accuracy"]) for row in rows}
    if scores != {(_EVALUATED_LOSS, 1 / _EVALUATED)}:
        what = f"records of a loss of {_EVALUATED_LOSS} and an accuracy of {1 / _EVALUATED}"
        return [CheckFinding("evaluation-record", what, f"{sorted(scores)}")]
    return []


def _expected_progress(config: Config, stretch: float) -> list[float]:
    """Return the share of the budget that is used after each step."""
    if config.train.budget != "time":
        steps = round(_STEPS * stretch)
        return [(i + 1) / steps for i in range(steps)]
    total = _MAX_SECONDS * stretch
    per_step = _PASS_SECONDS * _number(config.values, "GRAD_ACCUMULATION")
    return [min(1.0, (i + 1) * per_step / total) for i in range(math.ceil(total / per_step))]


def _rows(config: Config, rows: list[dict[str, Any]], expected: list[float]) -> list[CheckFinding]:
    """Check the progress that learning rate and pruning follow, and the learning rates."""
    before = [0.0, *expected]
    warmup = before[config.schedule.warmup_steps]
    for i, (row, progress) in enumerate(zip(rows, expected, strict=True)):
        if not math.isclose(row["progress"], progress, rel_tol=_TOLERANCE):
            text = f"{progress:.4f} of the budget used after step {i + 1} of {len(rows)}"
            return [CheckFinding("budget-progress", text, f"{row['progress']:.4f}")]
        # The step of the decay as a share of a budget of 1.
        span = replace(config.schedule, warmup_steps=0)
        rate = reference_learning_rate(config.schedule, i, len(rows))
        if i >= config.schedule.warmup_steps:
            share = (before[i] - warmup) / (1.0 - warmup)
            rate = reference_learning_rate(span, share, 1)
        if not math.isclose(row["lr"], rate, rel_tol=_TOLERANCE):
            text = f"a learning rate of {rate:g} at step {i + 1} of {len(rows)}"
            return [CheckFinding("budget-learning-rate", text, f"{row['lr']:g}")]
    return []


def _number(values: Mapping[str, SymbolValue], name: str) -> int:
    value = values[name]
    assert isinstance(value, int), (name, value)
    return value
