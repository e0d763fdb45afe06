"""Runner of all benchmarks: interleaved sides, processes, medians and tables. Imports no torch.

The sides of a benchmark take turns (A B A B), so that a drift in machine speed favours none of them;
figures are medians over the rounds, and ratios are taken within a round.
"""

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from gpt2.config import Config
from lib.env.machine import worker_environment
from lib.errors import Problem, RunError
from lib.files import canonical_json
from lib.project import python_module_command

Side = TypeVar("Side")
Figure = TypeVar("Figure")


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    measure: Callable[[Side], Figure | None],
    report: Callable[[int, str, Figure], None] = lambda count, name, figure: None,
    alternate: bool = False,
) -> dict[str, list[Figure]]:
    """Measure every side once in each of ``rounds`` rounds; return the figures by side.

    A side whose measurement returns None leaves the benchmark with all its figures. ``report`` gets
    the number of the round, from 1, the side and its figure. With ``alternate``, every other round
    runs in reverse order, because a later side runs on a warmer machine.
    """
    figures: dict[str, list[Figure]] = {name: [] for name in sides}
    for count in range(1, rounds + 1):
        order = list(figures)
        # The first round is reversed: two sides of a pair run as B A, A B.
        for name in reversed(order) if alternate and count % 2 else order:
            figure = measure(sides[name])
            if figure is None:
                del figures[name]
                continue
            figures[name].append(figure)
            report(count, name, figure)
    return figures


def time_calls(work: Callable[[], object], count: int, warm_up: int) -> list[float]:
    """Return the seconds of each of ``count`` calls, after ``warm_up`` other calls."""
    seconds = []
    for index in range(warm_up + count):
        started = time.perf_counter()
        work()
        if index >= warm_up:
            seconds.append(time.perf_counter() - started)
    return seconds


def within_rounds(numerators: Iterable[float], denominators: Iterable[float]) -> tuple[float, ...]:
    """Return the ratio of each round."""
    return tuple(a / b for a, b in zip(numerators, denominators, strict=True))


def median_and_range(ratios: Sequence[float]) -> str:
    """Format ratios of rounds as ``1.20 (1.10 to 1.30)``."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def run_training(name: str, config: Config, module: str, *arguments: str) -> dict[str, Any]:
    """Run ``module`` like a worker of ``config``, with its values on stdin; return its figures.

    Raises RunError with ``name``, the first reported error and the code of this error if the
    process fails.
    """
    done = subprocess.run(
        python_module_command(module, *arguments),
        input=canonical_json(dict(config.values)),
        env={**os.environ, **worker_environment(config.machine)},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"no output, exit code {done.returncode}"]
        errors = [line.removeprefix("ERROR").strip() for line in lines if line.startswith("ERROR")]
        error = (errors or lines[-1:])[0]
        reported = re.search(r" \[([a-z]+\.[a-z-]+)\]$", error)
        what = error[: reported.start()] if reported else error
        code = reported[1] if reported else "process.failed"
        raise RunError(Problem(f"{name}: {what}", code=code))
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_module(module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Any:
    """Run ``module`` in a process with additional environment variables; return its figures.

    Raises RunError if the process fails.
    """
    done = subprocess.run(
        python_module_command(module, *arguments),
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        what = f"{module} {' '.join(arguments)}: process failed (exit code {done.returncode})"
        raise RunError(Problem(what, code="process.failed"))
    return json.loads(done.stdout.splitlines()[-1])
