"""What ends training, and the progress that the learning rate and pruning follow."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gpt2.config import Config, TrainConfig


class Stopwatch:
    """Seconds spent inside its ``with`` blocks: training steps, and nothing else."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started: float | None = None
        self._before = 0.0

    @property
    def seconds(self) -> float:
        """Total so far, the block that is open included."""
        running = 0.0 if self._started is None else self._clock() - self._started
        return self._before + running

    def resume_at(self, seconds: float) -> None:
        """Go on from what an earlier process had counted."""
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


class Budget:
    """A length in iterations or in seconds of training, ``stretch`` times what is configured.

    Progress runs from 0 to 1. Of iterations and tokens it is known beforehand; of time it is
    measured after each step, and that value is written down, because a result depends on it.
    """

    def __init__(
        self, config: TrainConfig, block_size: int, warmup_steps: int, stretch: float = 1.0
    ) -> None:
        self.stretch = stretch
        self.tokens_per_iteration = config.tokens_per_iteration(block_size)
        # 0 where time decides.
        self.iterations = round(_iterations(config, self.tokens_per_iteration) * stretch)
        # 0 where iterations decide.
        self.seconds = config.max_time_seconds * stretch if config.budget == "time" else 0.0
        self._warmup_steps = warmup_steps
        # Unknown while the warm-up lasts, and not looked at.
        self._measured_warmup_progress = 1.0 if warmup_steps else 0.0

    @property
    def is_time(self) -> bool:
        """Whether results depend on how fast the machine is."""
        return self.seconds > 0

    @property
    def warmup_progress(self) -> float:
        """Progress at which the learning rate's warm-up ended; 1 while it lasts."""
        if self.is_time:
            return self._measured_warmup_progress
        return min(1.0, self._warmup_steps / self.iterations)

    def progress(self, iteration: int, seconds: float) -> float:
        """Part of the budget used by ``iteration`` steps that took ``seconds``."""
        if not self.is_time:
            return min(1.0, iteration / self.iterations)
        progress = min(1.0, seconds / self.seconds)
        if iteration == self._warmup_steps:
            self._measured_warmup_progress = progress
        return progress

    def state_dict(self) -> dict[str, float]:
        """What a resumed run cannot know by itself."""
        return {"warmup_progress": self._measured_warmup_progress}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from ``state``."""
        self._measured_warmup_progress = state["warmup_progress"]


def run_budget(config: Config) -> Budget:
    """The budget of a run, as long as its pruning declares."""
    block_size, warmup_steps = config.model.shape.block_size, config.schedule.warmup_steps
    return Budget(config.train, block_size, warmup_steps, config.pruning.stretch)


def seconds_left(progress: float, seconds: float) -> float | None:
    """Training time still to come at the pace so far, or None before the first step."""
    return seconds * (1.0 - progress) / progress if progress > 0.0 else None


def _iterations(config: TrainConfig, tokens_per_iteration: int) -> int:
    match config.budget:
        case "iterations":
            return config.max_iters
        case "tokens":
            return -(-config.max_tokens // tokens_per_iteration)
        case "time":
            return 0
    raise ValueError(f"unknown budget {config.budget!r}; known: iterations, tokens, time")
