"""Runs so long that a mistake in them costs hours: what they must have, and what they come to."""

from gpt2.config import Config
from gpt2.training.budget import run_budget
from lib.errors import Problem
from lib.units import short

# With a budget in seconds nothing is known of iterations.
LONG_SECONDS = 3600


def is_long(config: Config) -> bool:
    """Whether the run has ``LONG_RUN_ITERATIONS``, or trains for an hour by the clock."""
    budget = run_budget(config)
    if budget.is_time:
        return budget.seconds >= LONG_SECONDS
    return budget.iterations >= config.train.long_run_iterations


def long_run_problems(config: Config) -> list[Problem]:
    """Why a long run must not start: nothing saved on the way, or fp32 on a GPU for want of a word.

    paper_repro takes fp32 on purpose, so it is not asked.
    """
    if not is_long(config):
        return []
    found, interval = [], config.train.checkpoint_interval
    iterations = run_budget(config).iterations
    if not interval or 0 < iterations <= interval:
        what = f"CHECKPOINT_INTERVAL={interval} saves nothing before the end of a run of {length(config)}"
        advice = "type: SET=CHECKPOINT_INTERVAL=500, or set LONG_RUN_ITERATIONS to more"
        found.append(Problem(what, "CHECKPOINT_INTERVAL", advice))
    machine = config.machine
    if machine.device == "cuda" and machine.precision == "fp32" and not config.repro.strict:
        what = f"PRECISION=fp32 on a GPU under {config.repro.profile}, for {length(config)}"
        advice = "type: SET=PRECISION_BF16=y, or SET=RUN_PROFILE_PAPER_REPRO=y where fp32 is meant"
        found.append(Problem(what, "PRECISION", advice))
    return found


def length(config: Config) -> str:
    """``50,000 it``, or ``7,200 s``."""
    budget = run_budget(config)
    return f"{budget.seconds:,.0f} s" if budget.is_time else f"{budget.iterations:,} it"


def intended(config: Config) -> str:
    """What would be trained, in a line: to be read before a long run is started."""
    shape, train, machine = config.model.shape, config.train, config.machine
    attention = config.model.attention
    every = train.checkpoint_interval
    parts = [
        f"{short(config.model.num_params())} parameters",
        f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide",
        f"context {shape.block_size}",
        f"{attention.projection.name} {attention.pattern.name}",
        f"{attention.positions.name} positions",
        f"{machine.precision} on {machine.device}",
        f"{length(config)} x {short(train.tokens_per_iteration(shape.block_size))} tokens",
        f"{config.optimizer.name} {config.schedule.learning_rate:g}",
        f"checkpoint every {every:,} it" if every else "no checkpoint before the end",
    ]
    return ", ".join(parts)
