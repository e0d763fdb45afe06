"""Timing of a benchmark: the sides of a case take turns, with medians, peak memory and time left.

Sides that take turns (A B A B) share every drift of the machine, and ratios are taken within a round.
"""

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gpt2.running.kernel_checks import kernel_errors
from lib.console import log
from lib.errors import KablateError, Problem, RunError
from lib.report.render import markdown_table
from lib.units import GIB, format_duration

# A function that is timed. It may return its seconds, if it measures itself.
Step = Callable[[], object]
Build = Callable[[], Step]
# The first calls compile, select kernels, and create the state of the optimizer.
_WARM_UP = 3


@dataclass(frozen=True)
class Case:
    """Steps that do the same: side → function that builds its step. The first is the product's."""

    table: str
    name: str
    sides: Mapping[str, Build]
    # Times that a step does its work.
    repeats: int = 1


@dataclass(frozen=True)
class Timed:
    """Seconds of each round, peak bytes, and reasons of sides that were not measured, by side."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class Stopwatch:
    """Measures cases on a device until a time limit."""

    def __init__(
        self,
        device: torch.device,
        rounds: int,
        limit_seconds: float = float("inf"),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.rounds, self.clock = device, rounds, clock
        self.started = time.monotonic()
        self.limit_seconds = limit_seconds

    def measure(self, cases: Sequence[Case]) -> Iterator[Timed]:
        """Yield the figures of each case. A side that fails, or for which no time is left, has none."""
        total, done = sum(len(case.sides) for case in cases), 0
        for case in cases:
            timed, steps = Timed(case), dict[str, Step]()
            for name, build in case.sides.items():
                try:
                    with self._until_limit():
                        steps[name] = self._warmed_up(timed, name, build)
                except KablateError as error:
                    timed.problems[name] = " ".join(str(error).split())
                except kernel_errors() as error:
                    timed.problems[name] = (str(error).splitlines() or [type(error).__name__])[0]
                done += 1
                self._log(f"{case.name}, {name}", done / total)
            self._take_turns(steps, timed)
            steps.clear()
            self._free()
            yield timed

    def _take_turns(self, steps: Mapping[str, Step], timed: Timed) -> None:
        for _ in range(self.rounds):
            for name, step in steps.items():
                seconds = self._seconds(step) / timed.case.repeats
                timed.seconds.setdefault(name, []).append(seconds)

    def _warmed_up(self, timed: Timed, name: str, build: Build) -> Step:
        on_gpu = self.device.type == "cuda"
        # Of the other sides of the case.
        before = torch.cuda.memory_allocated(self.device) if on_gpu else 0
        step = build()
        for _ in range(_WARM_UP):
            step()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        step()
        timed.peak_bytes[name] = (
            torch.cuda.max_memory_allocated(self.device) - before if on_gpu else 0
        )
        return step

    def _seconds(self, step: Step) -> float:
        self._wait()
        started = self.clock()
        result = step()
        self._wait()
        return result if isinstance(result, float) else self.clock() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _free(self) -> None:
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def _until_limit(self) -> Iterator[None]:
        """Raise RunError inside the context as soon as the time limit is reached."""

        def stop(*_: object) -> None:
            what = f"not measured: the limit of {self.limit_seconds:.0f} s is reached"
            raise RunError(Problem(what, code="bench.time-limit"))

        if self.limit_seconds == float("inf"):
            yield
            return
        left = self.started + self.limit_seconds - time.monotonic()
        if left <= 0:
            stop()
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _log(self, text: str, share: float) -> None:
        passed = time.monotonic() - self.started
        left = min(passed * (1 / share - 1), max(0.0, self.limit_seconds - passed))
        log("BENCH", f"{text}   {share:.0%}, eta {format_duration(left)}")


def to_markdown(timed: Sequence[Timed]) -> str:
    """Return the tables, with a line for each side that was not measured."""
    lines = []
    for table in dict.fromkeys(each.case.table for each in timed):
        rows = [row for each in timed if each.case.table == table for row in _rows(each)]
        heads = ["case", "side", "ms", "of the first", "range of it", "GiB"]
        lines.append(f"{table}\n\n{markdown_table(heads, rows, left=(0, 1))}")
        lines += [
            f"{each.case.name}, {name}: {problem}\n"
            for each in timed
            if each.case.table == table
            for name, problem in each.problems.items()
        ]
    return "\n".join(lines)


def _rows(timed: Timed) -> Iterator[list[str]]:
    """Yield a row for each measured side; a ratio is the time as a multiple of the first side's."""
    first = next(iter(timed.seconds.values()), [])
    for name, seconds in timed.seconds.items():
        ratios = [a / b for a, b in zip(seconds, first, strict=True)]
        peak = timed.peak_bytes[name]
        yield [
            timed.case.name,
            name,
            f"{1000 * statistics.median(seconds):,.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{peak / GIB:.2f}" if peak else "",
        ]
