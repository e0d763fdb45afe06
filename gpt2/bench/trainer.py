"""``make bench``: trainer, mechanisms and optimizers against their counterparts. Imports no torch.

A case is the configuration of a single training on the CPU. Each side of a case runs in a separate
process, as does the measurement of mechanisms and that of optimizers (``trainer_worker``).
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.ablation.resolve import resolve_config
from gpt2.bench.runner import (
    median_and_range,
    run_module,
    take_turns,
    within_rounds,
)
from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.env.machine import worker_environment
from lib.errors import ConfigError, Problem
from lib.project import ROOT
from lib.report.render import markdown_table
from lib.units import format_size

_TRAINING: dict[str, SymbolValue] = {
    "SINGLE_TRAINING": True,
    "OPTIMIZER_ADAMW": True,
    "DATASET_DEFAULT": True,
    "DEVICE_CPU": True,
    "LOG_INTERVAL": 10,
    # Debug flags distort speed.
    "CHECK_NUMERICS": False,
    "MAX_ITERS": 1000,
}
_ONE_SEQUENCE: dict[str, SymbolValue] = {"GLOBAL_BATCH": 1, "BATCH_SIZE": 1, "GRAD_ACCUMULATION": 1}

_WORKER = "gpt2.bench.trainer_worker"

# name → (defconfig, settings, timed steps of one round)
CASES: dict[str, tuple[str, dict[str, SymbolValue], int]] = {
    "124m-fp32": ("gpt2-124m+cpu", {**_ONE_SEQUENCE, "PRECISION_FP32": True}, 2),
    "124m-bf16": ("gpt2-124m+cpu", {**_ONE_SEQUENCE, "PRECISION_BF16": True}, 4),
    "quickstart": ("gpt2-quickstart", {}, 40),
}


def case_config(spec: str, settings: dict[str, SymbolValue], threads: int) -> Config:
    """Return the configuration of a case, with ``threads`` CPU threads.

    Raises ConfigError if the configuration enables a debug flag.
    """
    common = ConfigLayer.of("command line", "bench", {**_TRAINING, "CPU_THREADS": threads})
    layers = [
        *defconfig_layers(ROOT, spec),
        common,
        ConfigLayer.of("command line", "case", settings),
    ]
    config = resolve_config(KconfigTree(), layers)
    if flags := config.numerics.debug_flags:
        what = f"{spec}: debug flags distort timings (expected none, got {flags})"
        raise ConfigError(Problem(what, code="config.conflict"))
    return config


@dataclass(frozen=True)
class TrainerComparison:
    """Result of one case: tokens per second of each side, and the ratio ours / plain per round.

    ``tuned`` is the plain loop started with the trainer's environment, which retains freed memory
    in the process. It separates the effect of the code from the effect of the allocator.
    """

    case: str
    ours: float
    plain: float
    tuned: float
    ratios: tuple[float, ...]
    tuned_ratios: tuple[float, ...]


def compare(case: str, threads: int, rounds: int, build_dir: Path) -> TrainerComparison:
    """Time the sides of ``case`` in ``rounds`` ≥ 1 rounds. Raises RunError if a side fails."""
    spec, settings, steps = CASES[case]
    config = case_config(spec, settings, threads)
    prepare_dataset(config.data, build_dir)
    tokens = config.train.tokens_per_iteration(config.model.shape.block_size)
    # The trainer starts its workers with these variables; a plain loop is started without them.
    tuned = worker_environment(config.machine)
    sides = {"ours": ("ours", tuned), "plain": ("plain", {}), "tuned": ("plain", tuned)}

    def speed(side: tuple[str, dict[str, str]]) -> float:
        loop, variables = side
        args = ["side", loop, case, str(threads), str(steps), str(build_dir)]
        return float(tokens / statistics.median(run_module(_WORKER, args, variables)))

    def report(count: int, side: str, tokens_per_second: float) -> None:
        log("BENCH", f"{case} {count}/{rounds}   {side} {tokens_per_second:,.0f} tok/s")

    speeds = take_turns(sides, rounds, speed, report)
    ratios, tuned_ratios = (
        within_rounds(speeds["ours"], speeds[other]) for other in ("plain", "tuned")
    )
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    return TrainerComparison(case, **medians, ratios=ratios, tuned_ratios=tuned_ratios)


def mechanisms(threads: int, rounds: int) -> Mapping[str, Any]:
    """Time every mechanism in a separate process.

    Returns tokens → step → forward and backward times of each round, relative to the baseline.
    """
    log("BENCH", "forward and backward of every mechanism")
    ratios: Mapping[str, Any] = run_module(_WORKER, ["mechanisms", str(threads), str(rounds)], {})
    return ratios


def optimizers(threads: int, rounds: int) -> Mapping[str, Any]:
    """Time every optimizer in a separate process.

    Returns optimizer → seconds of an update in each round, and bytes of state.
    """
    log("BENCH", "an update of every optimizer")
    updates: Mapping[str, Any] = run_module(_WORKER, ["optimizers", str(threads), str(rounds)], {})
    return updates


def to_markdown(
    comparisons: list[TrainerComparison], relative: Mapping[str, Any], updates: Mapping[str, Any]
) -> str:
    """Return the Markdown tables of cases, mechanisms and optimizers."""
    heads = ["case", "ours tok/s", "plain tok/s", "plain, our allocator tok/s"]
    heads += ["ours / plain", "ours / plain, our allocator"]
    cases = [
        [
            c.case,
            *(f"{speed:,.0f}" for speed in (c.ours, c.plain, c.tuned)),
            median_and_range(c.ratios),
            median_and_range(c.tuned_ratios),
        ]
        for c in comparisons
    ]
    tables = [markdown_table(heads, cases)]
    tables += [_mechanisms_table(relative)] if relative else []
    tables += [_optimizers_table(updates)] if updates else []
    return "\n".join(tables)


def _mechanisms_table(relative: Mapping[str, Any]) -> str:
    parts = [(tokens, part) for tokens in relative for part in ("forward", "backward")]
    heads = ["step", *(f"T={tokens} {part}" for tokens, part in parts)]
    rows = [
        [slug, *(median_and_range(relative[tokens][slug][part]) for tokens, part in parts)]
        for slug in next(iter(relative.values()))
    ]
    return markdown_table(heads, rows)


def _optimizers_table(updates: Mapping[str, Any]) -> str:
    first = next(iter(updates.values()))
    rows = []
    for name, update in updates.items():
        size = update["state_bytes"]
        milliseconds = 1000 * statistics.median(update["seconds"])
        ratios = within_rounds(update["seconds"], first["seconds"])
        rows.append(
            [
                name,
                f"{milliseconds:,.0f}",
                median_and_range(ratios),
                format_size(size),
                f"{size / first['state_bytes']:.2f}",
            ]
        )
    heads = ["optimizer", "update ms", "relative", "state", "relative"]
    return markdown_table(heads, rows)
