"""Faults of the training budget, and of the schedule that follows it."""

from typing import Any

from gpt2.config import TrainConfig
from gpt2.training import loop
from gpt2.training.budget import TrainingBudget, TrainingClock
from gpt2.training.metrics import MetricsLog
from gpt2.training.state import TrainingSession
from tests.mutants.mutant import Mutant, edited, nothing, replaced, then

_TIME = {"BUDGET_TIME": True}
_TOKENS = {"BUDGET_TOKENS": True}
_STRETCHED = {"OPTIMIZER_ADAMWPRUNE": True, "ADAMWPRUNE_VARIANT_BITTER3": True}
_SINGLE = "gpt2-124m"


def _caught(name: str, *patterns: str) -> Any:
    """Return the finding of the check of budgets."""
    return {"budgeted": (name, *patterns)}


def _everywhere(old: str, new: str) -> Any:
    """Return a plant in the budget of a run, as the trainer and the check read it."""
    return edited(TrainingBudget, "__init__", old, new)


MUTANTS = (
    Mutant(
        "minutes instead of seconds",
        "baseline",
        _caught("budget-steps", "last step 26;"),
        _everywhere("train.max_time_seconds *", "60 * train.max_time_seconds *"),
        settings=_TIME,
        quick=True,
    ),
    Mutant(
        "tokens are iterations",
        "baseline",
        _caught("budget-steps", "last step 26;"),
        edited(
            TrainingBudget,
            "__init__",
            "-(-train.max_tokens // self.tokens_per_iteration)",
            "train.max_tokens",
        ),
        settings=_TOKENS,
    ),
    Mutant(
        "stretch of a variant is ignored",
        "run",
        _caught("budget-steps", "last step 34; 26$"),
        _everywhere("* stretch)", ")"),
        _SINGLE,
        settings=_STRETCHED,
    ),
    Mutant(
        "accumulation counts twice",
        "baseline",
        _caught("tokens-per-iteration"),
        edited(
            TrainConfig,
            "tokens_per_iteration",
            "self.global_batch",
            "self.global_batch * self.grad_accumulation",
        ),
    ),
    Mutant(
        "schedule ends at half the budget",
        "baseline",
        _caught("budget-learning-rate", "rate 3 of 26"),
        edited(
            loop,
            "train_step",
            "session.iteration, session.progress,",
            "session.iteration, 2 * session.progress,",
        ),
    ),
    Mutant(
        "evaluations use up the time",
        "baseline",
        _caught("budget-steps", "last step 26;"),
        edited(
            loop,
            "train",
            "session.evaluate(session.whole_model(), stop)",
            "(session.clock.__enter__(), session.evaluate(session.whole_model(), stop), "
            "session.clock.__exit__(None, None, None))[1]",
        ),
        settings=_TIME,
    ),
    Mutant(
        "resumed run starts its time again",
        "baseline",
        _caught("budget-steps", "last step 26; 38$"),
        nothing(TrainingClock, "resume_at"),
        settings=_TIME,
    ),
    Mutant(
        "an evaluation is recorded at the last checkpoint",
        "baseline",
        _caught("evaluation-position"),
        edited(loop, "_record_evaluation", "iteration=session.iteration,", "iteration=0,"),
    ),
    Mutant(
        "an evaluation records its loss as its accuracy",
        "baseline",
        _caught("evaluation-record"),
        edited(
            loop,
            "_record_evaluation",
            "token_accuracy=evaluation.accuracy",
            "token_accuracy=evaluation.loss",
        ),
    ),
    Mutant(
        "records have the loss as gradient norm",
        "baseline",
        _caught("step-record"),
        edited(MetricsLog, "flush", "m.gradient_norm", "m.loss"),
    ),
    Mutant(
        "tokens of the last step are not counted",
        "baseline",
        _caught("budget-tokens"),
        replaced(
            TrainingSession,
            "tokens",
            lambda _: property(lambda s: (s.iteration - 1) * s.budget.tokens_per_iteration),
        ),
    ),
    Mutant(
        "progress is squared",
        "baseline",
        _caught("budget-progress"),
        then(TrainingBudget, "progress", lambda out, *given: out * out),
    ),
    Mutant(
        "cosine is a parabola",
        "baseline",
        _caught("budget-learning-rate"),
        edited(loop, "learning_rate_at", "(1.0 - math.cos(math.pi * x)) / 2.0", "x * x"),
    ),
)
