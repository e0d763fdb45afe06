"""Options of AdamW with SPAM."""

import math
from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import Problem
from lib.optim.adamw.options import AdamwOptions


@dataclass(frozen=True)
class AdamwspamOptions(AdamwOptions):
    """Options of Spike-Aware Adam with Momentum Reset (arXiv 2501.06842).

    All counts are optimizer steps.
    """

    name: ClassVar[str] = "adamwspam"

    theta: float = symbol("SPAM_THETA", low=1.0, high=1e12)
    # First step since the start or a reset with gradient clipping.
    clip_delay: int = symbol("SPAM_CLIP_DELAY")
    # In standard deviations of the last ``spike_window`` gradient norms.
    spike_threshold: float = symbol("SPAM_SPIKE_THRESHOLD", low=0.0, high=1e6)
    spike_window: int = symbol("SPAM_SPIKE_WINDOW")
    moment_damping: float = symbol("SPAM_MOMENT_DAMPING", low=0.0, high=1.0)
    variance_damping: float = symbol("SPAM_VARIANCE_DAMPING", low=0.0, high=1.0)
    interval: int = symbol("SPAM_INTERVAL")
    reset_warmup_steps: int = symbol("SPAM_WARMUP_STEPS")
    amsgrad: bool = symbol("SPAM_AMSGRAD")

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        reset = f"reset every {self.interval} steps, warm-up {self.reset_warmup_steps}"
        return f"{super().summary}, theta {self.theta:g}, {reset}"

    def age(self, step: int) -> int:
        """Return the steps since the start or the last reset, including ``step`` (from 1)."""
        return (step - 1) % self.interval + 1

    def resets(self, step: int) -> int:
        """Return the number of resets up to and including optimizer step ``step`` (from 1)."""
        return (step - 1) // self.interval

    def warmup_factor(self, step: int) -> float:
        """Return the learning-rate factor of step ``step`` (from 1): (1 − cos(π age / W)) / 2.

        The factor is 1 before the first reset, where the schedule's warm-up applies, and from age W
        on.
        """
        age = self.age(step)
        if self.resets(step) == 0 or age >= self.reset_warmup_steps:
            return 1.0
        return (1.0 - math.cos(math.pi * age / self.reset_warmup_steps)) / 2.0

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        if self.reset_warmup_steps >= self.interval:
            problems.append(
                Problem(
                    f"SPAM_WARMUP_STEPS: must be < SPAM_INTERVAL={self.interval} so that the "
                    f"warm-up ends, got {self.reset_warmup_steps}",
                    code="config.conflict",
                )
            )
        if self.clip_delay > self.interval:
            problems.append(
                Problem(
                    f"SPAM_CLIP_DELAY: must be <= SPAM_INTERVAL={self.interval} so that "
                    f"gradients are clipped, got {self.clip_delay}",
                    code="config.conflict",
                )
            )
        return problems
