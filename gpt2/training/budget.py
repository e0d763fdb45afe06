"""Training budget of a run, and the progress that learning rate and pruning schedules follow.

Imports no torch.
"""

import math
import time
from collections.abc import Callable
from typing import Self

from gpt2.config import Config


class TrainingClock:
    """Stopwatch of the seconds spent inside its ``with`` blocks: training steps only."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started: float | None = None
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Return the total so far, including an open block."""
        return self._before + (0.0 if self._started is None else self._clock() - self._started)

    def resume_at(self, seconds: float) -> None:
        self._before = seconds

    def __enter__(self) -> Self:
        self._started = self._clock()
        return self

    def __exit__(self, *error: object) -> None:
        self._before, self._started = self.seconds, None


class TrainingBudget:
    """Budget of a run in iterations or seconds, stretched by the factor of its pruning options.

    Progress runs from 0 to 1. For time it is measured after each step and recorded, because results
    depend on it; for the other kinds it is known in advance.
    """

    def __init__(self, config: Config) -> None:
        train, stretch = config.train, config.pruning.stretch
        self.stretch = stretch
        self.tokens_per_iteration = train.tokens_per_iteration(config.model.shape.block_size)
        # 0 for a time budget.
        iterations = 0
        match train.budget:
            case "iterations":
                iterations = train.max_iters
            case "tokens":
                iterations = -(-train.max_tokens // self.tokens_per_iteration)
            case "flops":
                flops = config.model.flops_per_token() * self.tokens_per_iteration
                iterations = math.ceil(train.max_flops / flops)
        self.iterations = round(iterations * stretch)
        # 0 for any other budget.
        self.seconds = train.max_time_seconds * stretch if train.budget == "time" else 0.0
        self._warmup_steps = config.schedule.warmup_steps
        # Progress at the end of the warm-up; unknown and unused during it.
        self.measured_warmup = 1.0 if self._warmup_steps else 0.0

    @property
    def is_time(self) -> bool:
        """Return whether the budget is time, so that results depend on the machine's speed."""
        return self.seconds > 0

    @property
    def warmup_progress(self) -> float:
        """Return the progress at which the learning rate warm-up ended; 1 during the warm-up."""
        if self.is_time:
            return self.measured_warmup
        return min(1.0, self._warmup_steps / self.iterations)

    def progress(self, iteration: int, seconds: float) -> float:
        """Return the share of the budget used by ``iteration`` steps that took ``seconds``."""
        if not self.is_time:
            return min(1.0, iteration / self.iterations)
        progress = min(1.0, seconds / self.seconds)
        if iteration == self._warmup_steps:
            self.measured_warmup = progress
        return progress
