"""``make bench-overhead``: the training overhead of records and trackers. Imports no torch.

Two comparisons, in which every training is a separate process, started like a worker: the trainer
against the bare loop of the same model, optimizer and batches, and the trainer with three trackers
against the trainer with none. The two sides of a pair run one after the other, in alternating
order, and only the ratio within the pair is used, so that a drift in machine speed favours neither
side.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2.ablation.resolve import resolve_config
from gpt2.bench.trainer import train_in_subprocess
from gpt2.config import Config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.files import pretty_json
from lib.report.significance import MedianInterval, median_interval

SCHEMA_VERSION = 1
MIN_PAIRS = 9
# In the first iterations the allocator still grows, and kernels are compiled and selected.
WARMUP_ITERATIONS = 3
_TRACKERS: dict[str, SymbolValue] = {
    "TRACKER_WANDB": True,
    "TRACKER_WANDB_MODE_OFFLINE": True,
    "TRACKER_TRACKIO": True,
    "TRACKER_TENSORBOARD": True,
}
_NO_TRACKERS: dict[str, SymbolValue] = {name: False for name in _TRACKERS if "MODE" not in name}


@dataclass(frozen=True)
class OverheadFigures:
    """Figures of one training. Times are in seconds."""

    # Wall-clock time of whole iterations, from the first timed iteration to the end of the last.
    seconds: float
    # CPU time of the training process in the same period, without sidecar processes.
    cpu_seconds: float
    # Time from the start of the process to the first iteration.
    start_up_seconds: float
    # SHA-256 of the final weights.
    weights: str


@dataclass(frozen=True)
class BenchSide:
    """One half of a pair: a training loop and its configuration."""

    name: str
    # recorded or bare
    loop: str
    config: Config


@dataclass(frozen=True)
class OverheadComparison:
    """A comparison: trainings with a feature (on) against trainings without it (off)."""

    name: str
    on: BenchSide
    off: BenchSide


@dataclass(frozen=True)
class OverheadResult:
    """Results of a comparison: the figures of each pair, in order."""

    question: OverheadComparison
    on: Sequence[OverheadFigures]
    off: Sequence[OverheadFigures]

    def ratios(self, field: str) -> list[float]:
        """Return the ratio on / off of ``field`` for each pair."""
        pairs = zip(self.on, self.off, strict=True)
        return [vars(on)[field] / vars(off)[field] for on, off in pairs]

    @property
    def same_weights(self) -> bool:
        """Return whether all trainings of both sides ended with bit-identical weights."""
        return len({figures.weights for figures in (*self.on, *self.off)}) == 1


def comparisons(
    tree: KconfigTree, layers: Sequence[ConfigLayer], iterations: int
) -> list[OverheadComparison]:
    """Return the comparisons of machinery and of trackers, for a training of ``iterations``.

    ``layers`` configure the training. Periodic evaluations are disabled on both sides: they are
    part of the experiment and not overhead of its records.
    """
    common: dict[str, SymbolValue] = {
        "SINGLE_TRAINING": True,
        "BUDGET_ITERATIONS": True,
        "MAX_ITERS": WARMUP_ITERATIONS + iterations,
        "EVAL_INTERVAL": 0,
        "SAMPLE_TOKENS": 0,
    }

    def config(trackers: dict[str, SymbolValue]) -> Config:
        layer = ConfigLayer.of("command line", "bench-overhead", common | trackers)
        return resolve_config(tree, [*layers, layer])

    plain, tracked = config(_NO_TRACKERS), config(_TRACKERS)
    recorded = BenchSide("the trainer", "recorded", plain)
    return [
        OverheadComparison("machinery", recorded, BenchSide("the bare loop", "bare", plain)),
        OverheadComparison(
            "trackers", BenchSide("with three trackers", "recorded", tracked), recorded
        ),
    ]


def measure(
    asked: Sequence[OverheadComparison], pairs: int, train: Callable[[BenchSide], OverheadFigures]
) -> list[OverheadResult]:
    """Train ``pairs`` pairs of each comparison, taking turns.

    Raises RunError if a training fails.
    """
    results: list[tuple[list[OverheadFigures], list[OverheadFigures]]] = [([], []) for _ in asked]
    for count in range(pairs):
        for question, (on, off) in zip(asked, results, strict=True):
            halves = [(question.on, on), (question.off, off)]
            # The second half runs on a warmer machine, so the order alternates.
            for side, figures in halves if count % 2 else reversed(halves):
                figures.append(train(side))
            last = on[-1].seconds / off[-1].seconds
            log(
                "BENCH",
                f"{question.name} {count + 1}/{pairs}   {last:.4f} of {off[-1].seconds:.2f} s",
            )
    return [OverheadResult(q, on, off) for q, (on, off) in zip(asked, results, strict=True)]


def train_side(side: BenchSide, build_dir: Path) -> OverheadFigures:
    """Train one side in a new process. Raises RunError if the process fails."""
    arguments = (side.loop, str(build_dir.absolute()), str(time.time()))
    return OverheadFigures(
        **train_in_subprocess(side.name, side.config, "gpt2.bench.overhead_worker", *arguments)
    )


def to_text(answers: Sequence[OverheadResult], iterations: int) -> str:
    """Return a paragraph for each comparison, with the median ratios and their intervals."""
    return "\n".join(_paragraph(answer, iterations) for answer in answers)


def to_json(answers: Sequence[OverheadResult], iterations: int) -> str:
    """Return all comparisons as one JSON document with sorted keys."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "iterations": iterations,
        "questions": {
            answer.question.name: {
                "seconds_ratio": _summary(answer.ratios("seconds")),
                "cpu_seconds_ratio": _summary(answer.ratios("cpu_seconds")),
                "same_weights": answer.same_weights,
                "on": [asdict(figures) for figures in answer.on],
                "off": [asdict(figures) for figures in answer.off],
            }
            for answer in answers
        },
    }
    return pretty_json(document)


def _summary(ratios: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(ratios), "ratios": [*ratios]} | asdict(
        median_interval(ratios)
    )


def _paragraph(answer: OverheadResult, iterations: int) -> str:
    question = answer.question
    iteration_seconds = statistics.median(f.seconds for f in answer.off) / iterations
    start_up = (
        f"{statistics.median(f.start_up_seconds for f in side):.1f}"
        for side in (answer.on, answer.off)
    )
    weights = "identical" if answer.same_weights else "DIFFERENT, so the sides are not comparable"
    return (
        f"{question.name}: {question.on.name} against {question.off.name}, {len(answer.on)} pairs "
        f"of {iterations} iterations of {1000 * iteration_seconds:.1f} ms\n"
        f"  wall       {_percentage(answer.ratios('seconds'))}\n"
        f"  CPU        {_percentage(answer.ratios('cpu_seconds'))}, training process only\n"
        f"  start-up   {' against '.join(start_up)} s, not included above\n"
        f"  weights    {weights}\n"
    )


def _percentage(ratios: Sequence[float]) -> str:
    """Format ratios as ``+0.84 % (-0.20 % to +1.90 %, 96 % interval of the median)``."""
    interval: MedianInterval = median_interval(ratios)
    low, middle, high = (
        f"{100 * (value - 1):+.2f} %"
        for value in (interval.low, statistics.median(ratios), interval.high)
    )
    return f"{middle} ({low} to {high}, {interval.coverage:.1%} interval of the median)"
