"""Timing of a benchmark: the sides of a case take turns, with medians, peak memory and time left.

Sides that take turns (A B A B) share every drift of the machine, and ratios are taken within a round.
"""

import gc
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gpt2.running.kernel_checks import kernel_errors
from lib.console import log
from lib.errors import KablateError, Problem, RunError
from lib.report.render import markdown_table
from lib.units import GIB, format_duration

# A function that is timed. It may return its seconds, if it measures itself.
Step = Callable[[], object]
Build = Callable[[], Step]
# Of a case: its names, and by side seconds of each round, peak bytes, and why it was not measured.
Figures = dict[str, Any]
# The first calls compile, select kernels, and create the state of the optimizer.
_WARM_UP = 3


class Case(NamedTuple):
    """Steps that do the same: side → function that builds its step. The first is the product's."""

    table: str
    name: str
    sides: Mapping[str, Build]
    # Times that a step does its work.
    repeats: int = 1


class Stopwatch:
    """Measures cases on a device, until a time limit if there is one."""

    def __init__(
        self,
        device: torch.device,
        rounds: int,
        limit_seconds: float = float("inf"),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.rounds, self.clock = device, rounds, clock
        self.started, self.limit_seconds = time.monotonic(), limit_seconds
        self.on_gpu = device.type == "cuda"

    def measure(self, cases: Sequence[Case]) -> Iterator[Figures]:
        """Yield the figures of each case. A side that fails, or for which no time is left, has none."""
        total, done = sum(len(case.sides) for case in cases), 0
        for case in cases:
            peaks, problems, steps = dict[str, int](), dict[str, str](), dict[str, Step]()
            for name, build in case.sides.items():
                try:
                    steps[name], peaks[name] = self._until_limit(build)
                except KablateError as error:
                    problems[name] = " ".join(str(error).split())
                except kernel_errors() as error:
                    problems[name] = (str(error).splitlines() or [type(error).__name__])[0]
                done += 1
                passed = time.monotonic() - self.started
                left = min(passed * (total / done - 1), max(0.0, self.limit_seconds - passed))
                eta = format_duration(left)
                log("BENCH", f"{case.name}, {name}   {done / total:.0%}, eta {eta}")
            seconds = self._take_turns(steps, case.repeats)
            steps.clear()
            torch._dynamo.reset()
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
            names = {"table": case.table, "case": case.name}
            yield {**names, "seconds": seconds, "peak_bytes": peaks, "problems": problems}

    def _take_turns(self, steps: Mapping[str, Step], repeats: int) -> dict[str, list[float]]:
        rounds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(self.rounds):
            for name, step in steps.items():
                started = self._now()
                result = step()
                seconds = self._now() - started
                rounds[name].append((result if isinstance(result, float) else seconds) / repeats)
        return rounds

    def _now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return self.clock()

    def _until_limit(self, build: Build) -> tuple[Step, int]:
        """Return the step and its peak bytes. Raises RunError as soon as the time limit is reached."""

        def stop(*_: object) -> None:
            what = f"not measured: the limit of {self.limit_seconds:.0f} s is reached"
            raise RunError(Problem(what, code="bench.time-limit"))

        if self.limit_seconds == float("inf"):
            return self._warmed_up(build)
        left = self.started + self.limit_seconds - time.monotonic()
        if left <= 0:
            stop()
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            return self._warmed_up(build)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _warmed_up(self, build: Build) -> tuple[Step, int]:
        # The other sides of the case have memory too.
        before = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
        step = build()
        for _ in range(_WARM_UP):
            step()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        step()
        return step, torch.cuda.max_memory_allocated(self.device) - before if self.on_gpu else 0


def to_markdown(figures: Sequence[Figures]) -> str:
    """Return the tables, with a line for each side that was not measured."""
    lines = []
    heads = ["case", "side", "ms", "of the first", "range of it", "GiB"]
    for table in dict.fromkeys(each["table"] for each in figures):
        cases = [each for each in figures if each["table"] == table]
        rows = [row for each in cases for row in _rows(each)]
        lines.append(f"{table}\n\n{markdown_table(heads, rows, left=(0, 1))}")
        lines += [
            f"{each['case']}, {name}: {problem}\n"
            for each in cases
            for name, problem in each["problems"].items()
        ]
    return "\n".join(lines)


def _rows(figures: Figures) -> Iterator[list[str]]:
    """Yield a row for each measured side; a ratio is the time as a multiple of the first side's."""
    first: list[float] = next(iter(figures["seconds"].values()), [])
    for name, seconds in figures["seconds"].items():
        ratios = [a / b for a, b in zip(seconds, first, strict=True)]
        peak = figures["peak_bytes"][name]
        yield [
            figures["case"],
            name,
            f"{1000 * statistics.median(seconds):,.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{peak / GIB:.2f}" if peak else "",
        ]
