"""``make bench-overhead``: what records and trackers cost while a run trains; imports no torch.

Two pairs of sides, each training a process of its own, started as a worker is: the trainer against
the bare loop of the same model, optimizer and batches, and the trainer with three trackers against
the trainer with none. Both sides of a pair run one after the other, in turns first, and only their
ratio is kept, so that a machine that becomes slower does not favour one.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2.ablation.resolve import resolve_config
from gpt2.bench.apart import train_apart
from gpt2.config import Config
from lib.analysis.significance import Interval, median_interval
from lib.binding import Value
from lib.console import say
from lib.files import indented_json
from lib.kconfig import Layer, Tree

SCHEMA_VERSION = 1
FEWEST_PAIRS = 9
# The allocator still grows in the first iterations, and kernels are compiled and chosen.
NOT_TIMED = 3
_TRACKERS: dict[str, Value] = {
    "TRACKER_WANDB": True,
    "TRACKER_WANDB_MODE_OFFLINE": True,
    "TRACKER_TRACKIO": True,
    "TRACKER_TENSORBOARD": True,
}
_NO_TRACKERS: dict[str, Value] = {name: False for name in _TRACKERS if "MODE" not in name}


@dataclass(frozen=True)
class Figures:
    """One training. Times are in seconds."""

    # Of whole iterations, from the first that is timed to the end of the last.
    seconds: float
    # Of the training process's threads in that time; a companion's are not among them.
    cpu_seconds: float
    # From the start of the process to the first iteration.
    start_up_seconds: float
    # SHA-256 of the weights in the end.
    weights: str


@dataclass(frozen=True)
class Side:
    """One half of a pair: which loop trains what."""

    name: str
    # recorded or bare
    loop: str
    config: Config


@dataclass(frozen=True)
class Question:
    """What something costs: trainings with it against trainings without."""

    name: str
    on: Side
    off: Side


@dataclass(frozen=True)
class Answer:
    """The figures of each pair, in the order of the pairs."""

    question: Question
    on: Sequence[Figures]
    off: Sequence[Figures]

    def ratios(self, field: str) -> list[float]:
        """``field`` with, over ``field`` without, of each pair."""
        pairs = zip(self.on, self.off, strict=True)
        return [vars(with_it)[field] / vars(without)[field] for with_it, without in pairs]

    @property
    def same_weights(self) -> bool:
        """Whether every training of both sides came to the same bits."""
        return len({figures.weights for figures in (*self.on, *self.off)}) == 1


def questions(tree: Tree, layers: Sequence[Layer], iterations: int) -> list[Question]:
    """Machinery and trackers, asked of what ``layers`` say as one training of ``iterations``.

    Evaluations between are left out on both sides: they are the experiment, and no record of it.
    """
    common: dict[str, Value] = {
        "SINGLE_TRAINING": True,
        "BUDGET_ITERATIONS": True,
        "MAX_ITERS": NOT_TIMED + iterations,
        "EVAL_INTERVAL": 0,
        "SAMPLE_TOKENS": 0,
    }

    def config(trackers: dict[str, Value]) -> Config:
        given = Layer.of("command line", "bench-overhead", common | trackers)
        return resolve_config(tree, [*layers, given])

    plain, tracked = config(_NO_TRACKERS), config(_TRACKERS)
    recorded = Side("the trainer", "recorded", plain)
    return [
        Question("machinery", recorded, Side("the bare loop", "bare", plain)),
        Question("trackers", Side("with three trackers", "recorded", tracked), recorded),
    ]


def measure(
    asked: Sequence[Question], pairs: int, train: Callable[[Side], Figures]
) -> list[Answer]:
    """``pairs`` pairs of each question, the questions in turn. RunError where a training fails."""
    found: list[tuple[list[Figures], list[Figures]]] = [([], []) for _ in asked]
    for count in range(pairs):
        for question, (on, off) in zip(asked, found, strict=True):
            halves = [(question.on, on), (question.off, off)]
            # The second half meets a warmer machine: each is second as often as the other.
            for side, figures in halves if count % 2 else reversed(halves):
                figures.append(train(side))
            last = on[-1].seconds / off[-1].seconds
            say(
                "BENCH",
                f"{question.name} {count + 1}/{pairs}   {last:.4f} of {off[-1].seconds:.2f} s",
            )
    return [Answer(q, on, off) for q, (on, off) in zip(asked, found, strict=True)]


def train_side(side: Side, build_dir: Path) -> Figures:
    """Train one side in a new process. RunError where it fails."""
    arguments = (side.loop, str(build_dir.absolute()), str(time.time()))
    return Figures(**train_apart(side.name, side.config, "gpt2.bench.loops", *arguments))


def to_text(answers: Sequence[Answer], iterations: int) -> str:
    """A paragraph for each question: the median ratio and its interval, and what goes with it."""
    return "\n".join(_paragraph(answer, iterations) for answer in answers)


def to_json(answers: Sequence[Answer], iterations: int) -> str:
    """One document with sorted keys."""
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
    return indented_json(document)


def _summary(ratios: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(ratios), "ratios": [*ratios]} | asdict(
        median_interval(ratios)
    )


def _paragraph(answer: Answer, iterations: int) -> str:
    question = answer.question
    each = statistics.median(f.seconds for f in answer.off) / iterations
    starts = (
        f"{statistics.median(f.start_up_seconds for f in side):.1f}"
        for side in (answer.on, answer.off)
    )
    bits = "the same weights" if answer.same_weights else "OTHER weights: they are not one training"
    return (
        f"{question.name}: {question.on.name} against {question.off.name}, {len(answer.on)} pairs "
        f"of {iterations} iterations of {1000 * each:.1f} ms\n"
        f"  wall       {_told(answer.ratios('seconds'))}\n"
        f"  processor  {_told(answer.ratios('cpu_seconds'))}   of the training process alone\n"
        f"  start-up   {' against '.join(starts)} s, not counted above\n"
        f"  {bits}\n"
    )


def _told(ratios: Sequence[float]) -> str:
    """``+0.84 % (-0.20 % to +1.90 %, 96 % interval of the median)``."""
    found: Interval = median_interval(ratios)
    low, middle, high = (
        f"{100 * (value - 1):+.2f} %"
        for value in (found.low, statistics.median(ratios), found.high)
    )
    return f"{middle} ({low} to {high}, {found.coverage:.1%} interval of the median)"
