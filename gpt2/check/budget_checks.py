"""The run trains what its budget says, and its schedule ends with the budget.

The configured budget is computed from the symbols' values. The trainer's loop is run on a model of
a few parameters with a budget of the same kind, a clock under control, evaluations and a resume.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

from gpt2.check.finding import CheckFinding, compare
from gpt2.check.short_run import DrivenModel, DrivenRun
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.check.update_checks import reference_learning_rate
from gpt2.config import Config
from gpt2.evaluate import DocumentLoss, EvaluationResult, Evaluator
from gpt2.training import loop
from gpt2.training.budget import run_budget
from gpt2.training.records import RecordWriter, StopCondition
from gpt2.training.state import TrainState
from lib.config.field import SymbolValue
from lib.pruning.options import StateOptions
from lib.pruning.reference import documented_stretch

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
    kind, stretch = str(subject.config.values["BUDGET"]), _stretch(subject.config)
    length = small.model.shape.block_size
    key = ("loop", small.train, small.schedule, small.optimizer, length, kind, stretch)
    trained = subject.context.once(key, lambda: _trained(subject, kind, stretch))
    return [*_configured(subject.config), *trained]


def _configured(config: Config) -> list[CheckFinding]:
    """Check length, batch and schedule of the configured run against the symbols' values."""
    budget, values, stretch = run_budget(config), config.values, _stretch(config)
    symbols = ("BATCH_SIZE", "GRAD_ACCUMULATION", "GPUS", "BLOCK_SIZE")
    tokens = math.prod(_number(config, name) for name in symbols)
    steps, seconds = 0.0, 0.0
    match values["BUDGET"]:
        case "iterations":
            steps = _number(config, "MAX_ITERS")
        case "tokens":
            # Rounded up to whole iterations.
            steps = math.ceil(_number(config, "MAX_TOKENS") / tokens)
        case "flops":
            flops = tokens * config.model.flops_per_token()
            steps = math.ceil(float(str(values["MAX_FLOPS"])) / flops)
        case _:
            seconds = _number(config, "GPT2_MAX_TIME") * stretch
    source = f"by BUDGET={values['BUDGET']} and the pruner's documented stretch:"
    rows = (
        ("tokens-per-iteration", "tokens per step", budget.tokens_per_iteration, tokens),
        ("budget-iterations", "optimizer steps", budget.iterations, round(steps * stretch)),
        ("budget-seconds", "seconds of training", budget.seconds, seconds),
    )
    findings = []
    for name, what, found, expected in rows:
        findings += compare(name, f"{what} {source}", found, expected, _TOLERANCE)
    return findings or _schedule(config, round(steps * stretch))


def _stretch(config: Config) -> float:
    """Return the documented budget of the pruner as a multiple of the configured one."""
    options = config.pruning
    if isinstance(options, StateOptions) and config.values["ADAMWPRUNE_STRETCH"]:
        return documented_stretch(str(config.values["ADAMWPRUNE_VARIANT"]))
    return 1.0


def _schedule(config: Config, iterations: int) -> list[CheckFinding]:
    """Check the learning rate at the start, around the warm-up, in the middle and at the end."""
    budget, schedule = run_budget(config), config.schedule
    warmup = schedule.warmup_steps
    for step in sorted({0, warmup - 1, warmup, iterations // 2, iterations - 1, iterations}):
        if not iterations or not 0 <= step <= iterations:
            continue
        progress = budget.progress(step, 0.0)
        rate = loop.learning_rate_at(schedule, step, progress, budget.warmup_progress)
        if iterations <= warmup <= step:
            # A warm-up as long as the budget leaves no decay.
            constant = schedule.kind == "constant"
            expected = schedule.learning_rate if constant else schedule.min_learning_rate
        else:
            expected = reference_learning_rate(schedule, step, iterations)
        what = f"a learning rate after {step} of {iterations} steps of"
        if findings := compare("schedule-end", what, rate, expected, _TOLERANCE):
            return findings
    return []


class _Rows(RecordWriter):
    """The records of training steps and evaluations."""

    def metrics(self, **record: Any) -> None:
        """Keep the row, by its kind."""
        vars(self).setdefault(record["kind"], []).append(record)


def _has_reached(state: TrainState, limit: int) -> bool:
    return state.iteration >= limit


def _loop(subject: StepUnderTest, config: Config) -> list[DrivenRun]:
    """Run the trainer's loop to an interruption, and a resumed one to the end of the budget."""
    template, runs, clock = subject.traced_run.run.session, list[DrivenRun](), [0.0]

    def advance(seconds: float) -> None:
        clock[0] += seconds

    def evaluate(*given: Any) -> EvaluationResult:
        advance(_EVALUATION_SECONDS)
        return EvaluationResult((DocumentLoss(0, _EVALUATED, 1, _EVALUATED * _EVALUATED_LOSS),))

    for limit in (_INTERRUPTED_AFTER, _MAX_STEPS):
        run = DrivenRun(template, config, prunes=False, clock=lambda: clock[0])
        if runs:
            run.resume_from(runs[0])
        run.model.register_forward_hook(lambda *given: advance(_PASS_SECONDS))
        # Equal gradients: their norm is the same in every step.
        for gradient in run.model.gradients.values():
            gradient.fill_(_GRADIENT)
        run.session.evaluate = cast(Evaluator, evaluate)
        run.session.records = _Rows(template.run)
        reached = partial(_has_reached, run.session, limit)
        loop.train(run.session, StopCondition(reached, 0))
        runs.append(run)
    return runs


def _trained(subject: StepUnderTest, kind: str, stretch: float) -> list[CheckFinding]:
    """Compare the records of the trainer's loop, with evaluations and a resume."""
    tokens = 4 * subject.small_exact.model.shape.block_size
    size: dict[str, SymbolValue] = {
        "MAX_ITERS": _STEPS,
        # Half a step more than the steps before the last one.
        "MAX_TOKENS": _STEPS * tokens - tokens // 2,
        "MAX_FLOPS": str((_STEPS - 0.5) * tokens * subject.small_exact.model.flops_per_token()),
        "GPT2_MAX_TIME": _MAX_SECONDS,
    }
    config = with_changes(subject.small_exact, BUDGET=kind, **(_BATCH | size))
    runs = _loop(subject, config)
    rows, evaluations = (
        [row for run in runs for row in vars(run.session.records).get(name, [])]
        for name in ("train", "eval")
    )
    progress = _expected_progress(config, stretch)
    steps, what = len(progress), f"with a budget of {kind}, evaluations and a resume, "
    weights = [weight for p in DrivenModel().parameters() for weight in p.flatten().tolist()]
    norm = _GRADIENT * math.sqrt(len(weights))
    places = [(i, i * tokens) for i in range(2, steps, 2)]
    found = [(row["iteration"], row["tokens"]) for row in evaluations]
    scores = [(row["val_loss"], row["token_accuracy"]) for row in evaluations]
    consumed = sum(run.model.tokens for run in runs), runs[-1].session.tokens
    last = rows[-1]["tokens"]
    score = (_EVALUATED_LOSS, 1 / _EVALUATED)
    columns: tuple[tuple[str, str, Any, Any, float], ...] = (
        ("budget-steps", "a last step", rows[-1]["iteration"], steps, 0.0),
        ("budget-steps", "step", [row["iteration"] for row in rows], [*range(1, steps + 1)], 0.0),
        ("budget-tokens", "tokens", (*consumed, last), (steps * tokens,) * 3, 0.0),
        ("budget-progress", "progress", [row["progress"] for row in rows], progress, _TOLERANCE),
        ("budget-learning-rate", "rate", [r["lr"] for r in rows], _rates(config, progress), 1e-9),
        ("evaluation-position", "(iteration, tokens) of evaluations", found, places, 0.0),
        ("evaluation-record", "loss and accuracy", scores, [score] * len(places), 0.0),
        ("step-record", "loss of step 1", rows[0]["loss"], _GRADIENT * math.fsum(weights), 1e-5),
        ("step-record", "norm of step", [r["grad_norm"] for r in rows], [norm] * steps, 1e-5),
    )
    for name, column, actual, expected, tolerance in columns:
        if findings := compare(name, what + column, actual, expected, tolerance):
            return findings
    return []


def _expected_progress(config: Config, stretch: float) -> list[float]:
    """Return the share of the budget that is used after each step."""
    if config.train.budget != "time":
        steps = round(_STEPS * stretch)
        return [(i + 1) / steps for i in range(steps)]
    total = _MAX_SECONDS * stretch
    per_step = _PASS_SECONDS * _number(config, "GRAD_ACCUMULATION")
    return [min(1.0, (i + 1) * per_step / total) for i in range(math.ceil(total / per_step))]


def _rates(config: Config, progress: list[float]) -> list[float]:
    """Return the learning rates, which follow the used budget after the warm-up."""
    schedule, before = config.schedule, [0.0, *progress]
    warmup = schedule.warmup_steps
    # The step of the decay as a share of a budget of 1.
    span, start = replace(schedule, warmup_steps=0), before[warmup]
    return [
        (
            reference_learning_rate(span, (before[i] - start) / (1.0 - start), 1)
            if i >= warmup
            else reference_learning_rate(schedule, i, len(progress))
        )
        for i in range(len(progress))
    ]


def _number(config: Config, name: str) -> int:
    value = config.values[name]
    assert isinstance(value, int), (name, value)
    return value
