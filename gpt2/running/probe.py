"""Seconds of an optimizer step and of an evaluation, measured on this machine on drawn tokens.

B micro-batch, T tokens.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gpt2.config import Config
from gpt2.data.dataset import TokenSplit, open_dataset
from gpt2.data.evaluation_windows import evaluation_windows
from gpt2.evaluate import Evaluator
from gpt2.model import GPT
from gpt2.training.loop import step_on_tokens
from gpt2.training.out_of_memory import cpu_memory_errors
from gpt2.training.state import TrainState, build_state
from lib.env.hardware import device_name
from lib.env.machine import set_up
from lib.env.preflight import require_machine
from lib.env.process_group import ProcessGroup
from lib.env.ranks import current_process
from lib.errors import DataError, Problem, RunError

Figure = TypeVar("Figure")
# Returns seconds, equal on all ranks.
Clock = Callable[[], float]

# Steps are timed until there are enough, or the time is used, but at least one.
_MAX_STEPS, _LIMIT_SECONDS = 10, 20.0
# Steps of all micro-batches are timed if so many fit into the time.
_MIN_STEPS = 3


class DrawnTokens(TokenSplit):
    """Random tokens as one document."""

    def __init__(self, count: int, vocab_size: int) -> None:
        super().__init__("drawn", [], None)
        self._tokens = np.random.default_rng(0).integers(vocab_size, size=count, dtype=np.uint16)

    @property
    def n_tokens(self) -> int:
        return len(self._tokens)

    def window(self, offset: int, length: int) -> np.ndarray:
        return self._tokens[offset : offset + length]


def repeated(measure: Callable[[], Figure], clock: Clock) -> list[Figure]:
    """Return the results of several calls, as many as the time allows."""
    started, figures = clock(), [measure()]
    while len(figures) < _MAX_STEPS and clock() - started < _LIMIT_SECONDS:
        figures.append(measure())
    return figures


def step_seconds(
    run_step: Callable[[int], object], micro_batches: int, clock: Clock
) -> tuple[float, int, int]:
    """Return the median seconds of a step of ``micro_batches``, and what was timed for it.

    ``run_step`` runs a step of some micro-batches. If three whole steps take too long, they are
    extrapolated from steps of one and of two micro-batches. Returns also the number of timed steps,
    and of micro-batches in the largest.
    """

    def step(count: int) -> float:
        started = clock()
        run_step(count)
        return clock() - started

    # The first step compiles, selects kernels, and creates the optimizer's state.
    step(1)
    one = step(1)
    if micro_batches <= 2 or _MIN_STEPS * micro_batches * one <= _LIMIT_SECONDS:
        seconds = repeated(lambda: step(micro_batches), clock)
        return statistics.median(seconds), len(seconds), micro_batches
    pairs = repeated(lambda: (step(1), step(2)), clock)
    first, more = statistics.median(a for a, _ in pairs), statistics.median(b - a for a, b in pairs)
    return first + (micro_batches - 1) * more, len(pairs), 2


def evaluation_seconds(training: TrainState, build_dir: Path, clock: Clock) -> float:
    """Return the seconds of one evaluation, from a batch per rank.

    The windows are those of the data set if it is prepared, else as many as whole ones have the tokens.
    """
    config, shape = training.config, training.config.model.shape
    try:
        split = open_dataset(config.data, build_dir).val
        budget = config.data.eval_tokens, config.data.eval_documents
        windows = len(evaluation_windows(split, shape.block_size, *budget))
    except DataError:
        windows = -(-config.data.eval_tokens // shape.block_size)
    tokens = training.group.size * config.train.batch_size * shape.block_size
    data = dataclasses.replace(config.data, eval_tokens=tokens, eval_documents=0)
    small = dataclasses.replace(config, data=data)
    drawn = DrawnTokens(tokens + 1, shape.vocab_size)
    evaluate = Evaluator(small, drawn, training.device, training.group)

    def timed() -> float:
        started = clock()
        evaluate(training.whole_model())
        return clock() - started

    timed()
    batches = -(-windows // config.train.batch_size)
    return statistics.median(repeated(timed, clock)) * batches / training.group.size


def probe(config: Config, build_dir: Path) -> dict[str, Any]:
    """Time steps and an evaluation of ``config``. Must be called on every rank.

    ``step_seconds`` is the median of ``timed_steps``, extrapolated if ``timed_micro_batches`` are fewer
    than those of a step. Raises PreflightError without the configured device, RunError without memory.
    """
    require_machine(config.machine, config.train.gpus)
    with ProcessGroup.join(current_process()) as group:
        device = set_up(config.machine, group.process, config.train.gpus)
        try:
            with cpu_memory_errors():
                return _times(config, build_dir, device, group)
        except torch.OutOfMemoryError as error:
            what = str(error).splitlines()[0]
            raise RunError(Problem(what, code="run.out-of-memory")) from None


def _times(
    config: Config, build_dir: Path, device: torch.device, group: ProcessGroup
) -> dict[str, Any]:
    torch.manual_seed(config.seed)
    training = build_state(config, GPT(config.model), group, device)
    # The memory of a step is not tried before it.
    training.steps_to_probe = 0
    training.model.train()
    shape = config.model.shape
    tokens_BT = torch.randint(
        shape.vocab_size, (config.train.batch_size, shape.block_size + 1), device=device
    )

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return group.agree(time.perf_counter())

    seconds, steps, timed = step_seconds(
        lambda count: step_on_tokens(training, count * [tokens_BT]),
        config.train.grad_accumulation,
        clock,
    )
    return {
        "device": device_name(device),
        "step_seconds": seconds,
        "timed_steps": steps,
        "timed_micro_batches": timed,
        "evaluation_seconds": evaluation_seconds(training, build_dir, clock),
    }
