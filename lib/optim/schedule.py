"""Learning-rate schedules as pure functions of step and budget progress; imports no torch.

Warm-up counts iterations: step s of W (s from 0) has the rate peak · (s + 1) / W, so that no step
has a rate of 0. Decay follows the budget, whatever its unit. With p the budget progress and p_w the
progress at the end of the warm-up,

    x = (p − p_w) / (1 − p_w)                  progress after the warm-up, from 0 to 1
    cosine     min + (peak − min) (1 + cos πx) / 2
    linear     peak − (peak − min) x
    constant   peak
    wsd        peak until x = 1 − f, then linear to min at x = 1

x is 0 at the first step after the warm-up, so the rate is continuous there for every budget.
"""

import math
from dataclasses import dataclass

from lib.config.field import kconfig_field
from lib.config.small_form import SmallForm, at_most
from lib.errors import ConfigError, Problem

# Minimum for SGD in a small form: at Adam's rates, its updates in a few iterations are below fp32
# resolution.
_SMALL_SGD_RATE = 0.1


def _small_learning_rate(form: SmallForm, name: str) -> str:
    rate = str(form.values[name])
    return str(max(_SMALL_SGD_RATE, float(rate))) if form.values["OPTIMIZER"] == "sgd" else rate


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of the learning-rate schedule; ``kind`` is cosine, linear, constant or wsd."""

    learning_rate: float = kconfig_field(
        "LEARNING_RATE", low=0.0, high=10.0, small=_small_learning_rate
    )
    min_learning_rate: float = kconfig_field("MIN_LEARNING_RATE", low=0.0, high=10.0)
    warmup_steps: int = kconfig_field("WARMUP_STEPS", small=at_most(2))
    kind: str = kconfig_field("LR_SCHEDULE")
    wsd_decay_fraction: float = kconfig_field("WSD_DECAY_FRACTION", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        peak, low = self.learning_rate, self.min_learning_rate
        if self.kind != "constant" and low > peak:
            what = f"MIN_LEARNING_RATE: must be <= LEARNING_RATE={peak:g}, got {low:g}"
            raise ConfigError(Problem(what, code="config.conflict"))
        if self.wsd_decay_fraction == 0.0:
            what = "WSD_DECAY_FRACTION: must be > 0, got 0"
            advice = "for a schedule without decay, set LR_SCHEDULE_CONSTANT=y"
            raise ConfigError(Problem(what, next=advice, code="config.out-of-range"))

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        end = "" if self.kind == "constant" else f" to {self.min_learning_rate:g}"
        return f"{self.kind} {self.learning_rate:g}{end}, warm-up {self.warmup_steps} steps"


def learning_rate_at(
    options: ScheduleOptions, step: int, progress: float, warmup_progress: float
) -> float:
    """Return the learning rate of optimizer step ``step`` (counted from 0).

    ``progress`` is the fraction of the budget used before this step, in [0, 1]. ``warmup_progress``
    is the progress at ``step == warmup_steps``: computed in advance for iteration and token
    budgets, recorded once for time budgets, unused during the warm-up.
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    remaining = 1.0 - warmup_progress
    # A warm-up as long as the budget leaves no room for the decay.
    decayed = (progress - warmup_progress) / remaining if remaining > 0.0 else 1.0
    x = min(1.0, max(0.0, decayed))
    # The completed share of the way from the peak to the minimum.
    share = {
        "constant": 0.0,
        "linear": x,
        "cosine": (1.0 - math.cos(math.pi * x)) / 2.0,
        "wsd": max(0.0, 1.0 - (1.0 - x) / options.wsd_decay_fraction),
    }[options.kind]
    return options.learning_rate + share * (options.min_learning_rate - options.learning_rate)
