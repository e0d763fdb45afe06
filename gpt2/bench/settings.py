"""``make bench-settings`` and ``make bench-overhead``: what a setting, and recording, cost.

Settings: one setting at a time is changed from the base, the configuration in ``.config`` as a
single training. Overhead: the trainer against the bare loop of the same model, optimizer and
batches, and the trainer with three trackers against the trainer with none. Every training is a
separate process, started like a worker. Imports no torch.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpt2.ablation.resolve import resolve_config
from gpt2.bench.runner import (
    median_and_range,
    run_training,
    take_turns,
    within_rounds,
)
from gpt2.config import Config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.errors import ConfigError, Problem, RunError
from lib.files import pretty_json
from lib.report.render import markdown_table
from lib.report.significance import MedianInterval, median_interval
from lib.units import MIB

BASE = "base"
MIN_ROUNDS = 3
_SCHEMA_VERSION = 1
MIN_PAIRS = 9
# In the first iterations the allocator still grows, and kernels are compiled and selected.
WARMUP_ITERATIONS = 3
_REASON = "benchmark"
_HALF: dict[str, SymbolValue] = {"PRECISION_WHY": _REASON}
_ROUNDED: dict[str, SymbolValue] = {"MATMUL_WHY": _REASON}
_AHEAD: dict[str, SymbolValue] = {"LOADER_WORKERS": 2}
# One setting per entry, together with the required reasons and the symbols that it depends on.
CHANGES: Sequence[dict[str, SymbolValue]] = (
    {"PRECISION_FP32": True},
    {"PRECISION_BF16": True, **_HALF},
    {"PRECISION_FP16": True, **_HALF},
    {"MATMUL_PRECISION_HIGHEST": True},
    {"MATMUL_PRECISION_HIGH": True, **_ROUNDED},
    {"MATMUL_PRECISION_MEDIUM": True, **_ROUNDED},
    {"ATTENTION_BACKEND_AUTO": True},
    {"ATTENTION_BACKEND_FLASH": True},
    {"ATTENTION_BACKEND_EFFICIENT": True},
    {"ATTENTION_BACKEND_MATH": True},
    {"ATTENTION_BACKEND_ROWS": True},
    {"DETERMINISTIC_STRICT": True},
    {"DETERMINISTIC_WARN": True},
    {"DETERMINISTIC_OFF": True},
    {"CUDNN_BENCHMARK": True},
    {"COMPILE": True},
    {"GRAD_CHECKPOINTING": True},
    {"CPU_THREADS": 2},
    {"EXPANDABLE_SEGMENTS": True},
    {"PIN_MEMORY": False},
    _AHEAD,
    {**_AHEAD, "PREFETCH_FACTOR": 4},
    {**_AHEAD, "PERSISTENT_WORKERS": False},
)
_TRACKERS: dict[str, SymbolValue] = {
    "TRACKER_WANDB": True,
    "TRACKER_WANDB_MODE_OFFLINE": True,
    "TRACKER_TRACKIO": True,
    "TRACKER_TENSORBOARD": True,
}
_NO_TRACKERS: dict[str, SymbolValue] = {name: False for name in _TRACKERS if "MODE" not in name}
# Debugging symbols that distort timings.
_DEBUG_SYMBOLS = ("DETECT_ANOMALY",)


@dataclass(frozen=True)
class BenchVariant:
    """Benchmark variant: the base, or the base with one changed setting."""

    name: str
    config: Config


@dataclass(frozen=True)
class SettingFigures:
    """Figures of one training of a few steps."""

    tokens_per_second: float
    # Peak memory of the process on a CPU, of all tensors on a GPU.
    peak_bytes: int
    # Loss of the last step, in nats.
    loss: float
    # SHA-256 of the final weights, which shows whether the result is bit-identical to the base.
    weights: str


# Function that trains a variant once. Raises RunError with the variant's name if the training fails.
TrainVariant = Callable[[BenchVariant], SettingFigures]


def variants(
    tree: KconfigTree, layers: Sequence[ConfigLayer], names: str = ""
) -> tuple[list[BenchVariant], list[Problem]]:
    """Return the base with all applicable variants, and the problems of the inapplicable ones.

    ``names`` restricts the symbols. Raises ConfigError if the base enables a debugging symbol or if
    ``names`` contains an unknown setting.
    """
    # The speed profile permits settings that the paper profile refuses.
    single: dict[str, SymbolValue] = {"SINGLE_TRAINING": True, "RUN_PROFILE_MAXOUT_SPEED": True}
    # Enabled by default for a paper, and not to be timed.
    single["CHECK_NUMERICS"] = False
    layers = [*layers, ConfigLayer.of("command line", "bench-settings", single)]
    base = resolve_config(tree, layers)
    if enabled := [name for name in _DEBUG_SYMBOLS if base.values.get(name)]:
        raise ConfigError(*(_debug_problem(name) for name in enabled))
    variants, left_out = [BenchVariant(BASE, base)], list[Problem]()
    for change in _chosen(names):
        name = _name(change)
        try:
            config = resolve_config(tree, [*layers, ConfigLayer.of("command line", name, change)])
        except ConfigError as error:
            first = error.problems[0]
            left_out.append(replace(first, what=f"{name}: {first.what}", where="", next=""))
            continue
        if config.values != base.values:
            variants.append(BenchVariant(name, config))
    return variants, left_out


def measure_settings(
    every: Sequence[BenchVariant], rounds: int, train: TrainVariant
) -> dict[str, list[SettingFigures]]:
    """Train the variants in turn and return the figures of each round by variant.

    A variant that fails is left out with a warning. Raises RunError if the base fails.
    """

    def attempt(variant: BenchVariant) -> SettingFigures | None:
        try:
            return train(variant)
        except RunError as error:
            if variant.name == BASE:
                raise
            log("WARN", f"left out: {error}")
            return None

    def report(count: int, name: str, figures: SettingFigures) -> None:
        log("BENCH", f"{count}/{rounds}  {name}  {figures.tokens_per_second:,.0f} tok/s")

    return take_turns({variant.name: variant for variant in every}, rounds, attempt, report)


def train_variant(variant: BenchVariant, steps: int, build_dir: Path) -> SettingFigures:
    """Train ``steps`` steps in a new process. Raises RunError if the process fails."""
    arguments = ("setting", str(steps), str(build_dir))
    return SettingFigures(
        **run_training(variant.name, variant.config, "gpt2.bench.settings_worker", *arguments)
    )


def settings_to_markdown(figures: Mapping[str, Sequence[SettingFigures]]) -> str:
    """Return a Markdown table with the medians and ratio ranges of every variant."""
    base = figures[BASE]
    rows = []
    for name, rounds in figures.items():
        speeds = [f.tokens_per_second for f in rounds]
        ratios = within_rounds(speeds, [f.tokens_per_second for f in base])
        peak = statistics.median(f.peak_bytes for f in rounds) / MIB
        losses = dict.fromkeys(repr(f.loss) for f in rounds)
        rows.append(
            [
                name,
                f"{statistics.median(speeds):,.0f}",
                median_and_range(ratios),
                f"{peak:,.0f}",
                ", ".join(losses),
                _bits(rounds, base),
            ]
        )
    heads = ["setting", "tok/s", "against base", "peak MiB", "loss", "bits"]
    return markdown_table(heads, rows, left=(0, 5))


def _bits(rounds: Iterable[SettingFigures], base: Sequence[SettingFigures]) -> str:
    digests = {f.weights for f in rounds}
    if len(digests) > 1:
        return "vary between rounds"
    return "as the base" if digests == {f.weights for f in base} else "other"


def _chosen(names: str) -> list[dict[str, SymbolValue]]:
    """Return the changes of the symbols or choices in ``names``, or all changes if it is empty."""
    selected = names.replace(",", " ").split()
    changes = [c for c in CHANGES if not selected or any(_is_of(c, name) for name in selected)]
    if unknown := [name for name in selected if not any(_is_of(c, name) for c in CHANGES)]:
        settings = ", ".join(dict.fromkeys(_name(change) for change in CHANGES))
        code = "config.unknown-symbol"
        raise ConfigError(
            *(
                Problem(f"{name}: unknown setting (expected one of {settings})", "SYM", code=code)
                for name in unknown
            )
        )
    return changes


def _is_of(change: Mapping[str, SymbolValue], name: str) -> bool:
    """Return whether the changed symbol is ``name`` or a member of the choice ``name``."""
    symbol = _symbol(change)
    return symbol == name or symbol.startswith(f"{name}_")


def _symbol(change: Mapping[str, SymbolValue]) -> str:
    return [name for name in change if not name.endswith("_WHY")][-1]


def _name(change: Mapping[str, SymbolValue]) -> str:
    """Return the name of a variant, such as ``CPU_THREADS=2``; y is omitted."""
    symbol = _symbol(change)
    value = change[symbol]
    if isinstance(value, bool):
        return symbol if value else f"{symbol}=n"
    return f"{symbol}={value}"


def _debug_problem(name: str) -> Problem:
    what = f"{name}: debugging distorts timings (expected n, got y)"
    return Problem(what, next=f"type: make defconfig-NAME SET={name}=n", code="config.conflict")


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
    """Paired runs with a feature (on) and without it (off)."""

    name: str
    on: BenchSide
    off: BenchSide


@dataclass(frozen=True)
class OverheadResult:
    """Results of a comparison: the figures of each pair, in order."""

    comparison: OverheadComparison
    on: Sequence[OverheadFigures]
    off: Sequence[OverheadFigures]

    def ratios(self, field: str) -> list[float]:
        """Return the ratio on / off of ``field`` for each pair."""
        on, off = ([vars(figures)[field] for figures in side] for side in (self.on, self.off))
        return list(within_rounds(on, off))

    @property
    def same_weights(self) -> bool:
        """Return whether all runs of both sides ended with bit-identical weights."""
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


def measure_overhead(
    comparisons: Sequence[OverheadComparison],
    pairs: int,
    train: Callable[[BenchSide], OverheadFigures],
) -> list[OverheadResult]:
    """Train ``pairs`` pairs of each comparison, in alternating order.

    Raises RunError if a training fails.
    """
    sides = {
        f"{comparison.name} {half}": side
        for comparison in comparisons
        for half, side in (("on", comparison.on), ("off", comparison.off))
    }

    def report(count: int, name: str, figures: OverheadFigures) -> None:
        log("BENCH", f"{name} {count}/{pairs}   {figures.seconds:.2f} s")

    figures = take_turns(sides, pairs, train, report, alternate=True)
    return [
        OverheadResult(
            comparison, figures[f"{comparison.name} on"], figures[f"{comparison.name} off"]
        )
        for comparison in comparisons
    ]


def train_side(side: BenchSide, build_dir: Path) -> OverheadFigures:
    """Train one side in a new process. Raises RunError if the process fails."""
    arguments = (side.loop, str(build_dir.absolute()), str(time.time()))
    return OverheadFigures(
        **run_training(side.name, side.config, "gpt2.bench.settings_worker", *arguments)
    )


def overhead_to_text(results: Sequence[OverheadResult], iterations: int) -> str:
    """Return a paragraph for each comparison, with the median ratios and their intervals."""
    return "\n".join(_paragraph(result, iterations) for result in results)


def overhead_to_json(results: Sequence[OverheadResult], iterations: int) -> str:
    """Return all comparisons as one JSON document with sorted keys."""
    document = {
        "schema_version": _SCHEMA_VERSION,
        "iterations": iterations,
        "questions": {
            result.comparison.name: {
                "seconds_ratio": _summary(result.ratios("seconds")),
                "cpu_seconds_ratio": _summary(result.ratios("cpu_seconds")),
                "same_weights": result.same_weights,
                "on": [asdict(figures) for figures in result.on],
                "off": [asdict(figures) for figures in result.off],
            }
            for result in results
        },
    }
    return pretty_json(document)


def _summary(ratios: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(ratios), "ratios": [*ratios]} | asdict(
        median_interval(ratios)
    )


def _paragraph(result: OverheadResult, iterations: int) -> str:
    comparison = result.comparison
    iteration_seconds = statistics.median(f.seconds for f in result.off) / iterations
    start_up = (
        f"{statistics.median(f.start_up_seconds for f in side):.1f}"
        for side in (result.on, result.off)
    )
    weights = "identical" if result.same_weights else "DIFFERENT, so the sides are not comparable"
    return (
        f"{comparison.name}: {comparison.on.name} against {comparison.off.name}, {len(result.on)} pairs "
        f"of {iterations} iterations of {1000 * iteration_seconds:.1f} ms\n"
        f"  wall       {_percentage(result.ratios('seconds'))}\n"
        f"  CPU        {_percentage(result.ratios('cpu_seconds'))}, training process only\n"
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
