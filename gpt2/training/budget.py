"""Training budget of a run, and the progress that learning rate and pruning schedules follow.

Imports no torch.
"""

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gpt2.config import Config, TrainConfig


class TrainingClock:
    """Stopwatch of the seconds spent inside its ``with`` blocks: training steps only."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started: float | None = None
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Return the total so far, including an open block."""
        running = 0.0 if self._started is None else self._clock() - self._started
        return self._before + running

    def resume_at(self, seconds: float) -> None:
        """Continue from the ``seconds`` of an earlier process."""
        assert self._started is None
        self._before = seconds

    def __enter__(self) -> Self:
        self._started = self._clock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._before, self._started = self.seconds, None


class TrainingBudget:
    """Training budget in iterations or seconds: ``stretch`` times the configured length.

    Progress runs from 0 to 1. For time it is measured after each step and recorded, because results
    depend on it; for the other kinds it is known in advance.
    """

    def __init__(
        self,
        config: TrainConfig,
        block_size: int,
        warmup_steps: int,
        stretch: float = 1.0,
        flops_per_token: float = 0.0,
    ) -> None:
        self.stretch = stretch
        self.tokens_per_iteration = config.tokens_per_iteration(block_size)
        flops_per_iteration = flops_per_token * self.tokens_per_iteration
        # 0 for a time budget.
        iterations = _iterations(config, self.tokens_per_iteration, flops_per_iteration)
        self.iterations = round(iterations * stretch)
        # 0 for any other budget.
        self.seconds = config.max_time_seconds * stretch if config.budget == "time" else 0.0
        self._warmup_steps = warmup_steps
        # Unknown and unused during the warm-up.
        self._measured_warmup_progress = 1.0 if warmup_steps else 0.0

    @property
    def is_time(self) -> bool:
        """Return whether the budget is time, so that results depend on the machine's speed."""
        return self.seconds > 0

    @property
    def warmup_progress(self) -> float:
        """Return the progress at which the learning rate warm-up ended; 1 during the warm-up."""
        if self.is_time:
            return self._measured_warmup_progress
        return min(1.0, self._warmup_steps / self.iterations)

    def progress(self, iteration: int, seconds: float) -> float:
        """Return the share of the budget used by ``iteration`` steps that took ``seconds``."""
        if not self.is_time:
            return min(1.0, iteration / self.iterations)
        progress = min(1.0, seconds / self.seconds)
        if iteration == self._warmup_steps:
            self._measured_warmup_progress = progress
        return progress

    def state_dict(self) -> dict[str, float]:
        """Return the state that a resumed run cannot recompute."""
        return {"warmup_progress": self._measured_warmup_progress}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from ``state``."""
        self._measured_warmup_progress = state["warmup_progress"]


def run_budget(config: Config) -> TrainingBudget:
    """Return the budget of a run, stretched by the factor of its pruning options."""
    block_size, warmup_steps = config.model.shape.block_size, config.schedule.warmup_steps
    flops = config.model.flops_per_token()
    return TrainingBudget(config.train, block_size, warmup_steps, config.pruning.stretch, flops)


def remaining_seconds(progress: float, seconds: float) -> float | None:
    """Return the remaining training time at the average speed, or None before the first step."""
    return seconds * (1.0 - progress) / progress if progress > 0.0 else None


def _iterations(config: TrainConfig, tokens_per_iteration: int, flops_per_iteration: float) -> int:
    match config.budget:
        case "iterations":
            return config.max_iters
        case "tokens":
            return -(-config.max_tokens // tokens_per_iteration)
        case "flops":
            return math.ceil(config.max_flops / flops_per_iteration)
        case "time":
            return 0
    raise ValueError(f"unknown budget {config.budget!r}; known: iterations, tokens, flops, time")
