"""Extra launch checks and a one-line summary for long runs, where a mistake costs hours."""

from gpt2.config import Config
from gpt2.training.budget import run_budget
from lib.errors import Problem
from lib.units import short

# Threshold for a time budget, whose number of iterations is unknown.
LONG_SECONDS = 3600


def is_long(config: Config) -> bool:
    """Return whether the run has ``LONG_RUN_ITERATIONS`` or more, or a time budget of an hour."""
    budget = run_budget(config)
    if budget.is_time:
        return budget.seconds >= LONG_SECONDS
    return budget.iterations >= config.train.long_run_iterations


def long_run_problems(config: Config) -> list[Problem]:
    """Return the problems that block a long run: no checkpoint, or accidental fp32 on a GPU.

    Strict profiles such as paper_repro use fp32 deliberately and are exempt.
    """
    if not is_long(config):
        return []
    problems, interval = [], config.train.checkpoint_interval
    iterations = run_budget(config).iterations
    if not interval or 0 < iterations <= interval:
        what = f"CHECKPOINT_INTERVAL={interval} saves no checkpoint during {length(config)}"
        advice = "type: SET=CHECKPOINT_INTERVAL=500, or increase LONG_RUN_ITERATIONS"
        problems.append(Problem(what, "CHECKPOINT_INTERVAL", advice, code="long-run.no-checkpoint"))
    machine = config.machine
    if machine.device == "cuda" and machine.precision == "fp32" and not config.repro.strict:
        what = f"PRECISION=fp32 on a GPU with profile {config.repro.profile}, for {length(config)}"
        advice = "type: SET=PRECISION_BF16=y, or SET=RUN_PROFILE_PAPER_REPRO=y to require fp32"
        problems.append(Problem(what, "PRECISION", advice, code="long-run.fp32"))
    return problems


def length(config: Config) -> str:
    """Format the budget of a run: ``50,000 it``, or ``7,200 s``."""
    budget = run_budget(config)
    return f"{budget.seconds:,.0f} s" if budget.is_time else f"{budget.iterations:,} it"


def intended(config: Config) -> str:
    """Summarize the planned training in one line, to be reviewed before a long run starts."""
    shape, train, machine = config.model.shape, config.train, config.machine
    attention = config.model.attention
    interval = train.checkpoint_interval
    parts = [
        f"{short(config.model.num_params())} parameters",
        f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide",
        f"context {shape.block_size}",
        f"{attention.projection.name} {attention.pattern.name}",
        f"{attention.positions.name} positions",
        f"{machine.precision} on {machine.device}",
        f"{length(config)} x {short(train.tokens_per_iteration(shape.block_size))} tokens",
        f"{config.optimizer.name} {config.schedule.learning_rate:g}",
        f"checkpoint every {interval:,} it" if interval else "no checkpoint before the end",
    ]
    return ", ".join(parts)
