"""Benchmark cases: configurations of a single training on the CPU. Imports no torch."""

import json
import os
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.ablation.resolve import resolve_config
from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.env.gpu import GIB
from lib.env.machine import worker_environment
from lib.errors import ConfigError, Problem, RunError
from lib.files import canonical_json
from lib.project import ROOT, python_module_command

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


# One benchmark training in a separate process, started like a worker. Imports no torch.


def train_in_subprocess(name: str, config: Config, module: str, *arguments: str) -> dict[str, Any]:
    """Run ``module`` with the values of ``config`` on stdin and return the JSON figures it prints.

    Raises RunError with ``name``, the first reported error and the code of this error if the
    process fails.
    """
    done = subprocess.run(
        python_module_command(module, *arguments),
        input=canonical_json(dict(config.values)),
        env={**os.environ, **worker_environment(config.machine)},
        capture_output=True,
        text=True,
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


# Interleaved timing of the benchmark sides (A B A B), with tables of medians and ratios.
#
# Imports no torch.


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
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for count in range(rounds):
        for side, (loop, variables) in sides.items():
            args = [loop, case, str(threads), str(steps), str(build_dir)]
            seconds = _run("gpt2.bench.trainer_worker", args, variables)
            speeds[side].append(tokens / statistics.median(seconds))
        last = ", ".join(f"{side} {values[-1]:,.0f}" for side, values in speeds.items())
        log("BENCH", f"{case} {count + 1}/{rounds}   {last} tok/s")
    ratios, tuned_ratios = (
        tuple(a / b for a, b in zip(speeds["ours"], speeds[other], strict=True))
        for other in ("plain", "tuned")
    )
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    return TrainerComparison(case, **medians, ratios=ratios, tuned_ratios=tuned_ratios)


def mechanisms(threads: int, rounds: int) -> Mapping[str, Any]:
    """Run ``gpt2.bench.mechanisms`` in a separate process.

    Returns tokens → step → forward and backward times of each round, relative to the baseline.
    """
    log("BENCH", "forward and backward of every mechanism")
    ratios: Mapping[str, Any] = _run("gpt2.bench.mechanisms", [str(threads), str(rounds)], {})
    return ratios


def optimizers(threads: int, rounds: int) -> Mapping[str, Any]:
    """Run ``gpt2.bench.optimizers`` in a separate process.

    Returns optimizer → seconds of an update in each round, and bytes of state.
    """
    log("BENCH", "an update of every optimizer")
    updates: Mapping[str, Any] = _run("gpt2.bench.optimizers", [str(threads), str(rounds)], {})
    return updates


def to_markdown(
    comparisons: list[TrainerComparison], relative: Mapping[str, Any], updates: Mapping[str, Any]
) -> str:
    """Return the Markdown tables of cases, mechanisms and optimizers."""
    heads = ["case", "ours tok/s", "plain tok/s", "plain, our allocator tok/s"]
    heads += ["ours / plain", "ours / plain, our allocator"]
    lines = [f"| {' | '.join(heads)} |", "|-|" + "-:|" * (len(heads) - 1)]
    for c in comparisons:
        speeds = " | ".join(f"{speed:,.0f}" for speed in (c.ours, c.plain, c.tuned))
        lines.append(f"| {c.case} | {speeds} | {_spread(c.ratios)} | {_spread(c.tuned_ratios)} |")
    if relative:
        heads = [f"T={tokens} {part}" for tokens in relative for part in ("forward", "backward")]
        lines += ["", f"| step | {' | '.join(heads)} |", "|-|" + "-:|" * len(heads)]
        for slug in next(iter(relative.values())):
            cells = [
                _spread(r[slug][p]) for r in relative.values() for p in ("forward", "backward")
            ]
            lines.append(f"| {slug} | {' | '.join(cells)} |")
    if updates:
        heads = ["optimizer", "update ms", "relative", "state GiB", "relative"]
        lines += ["", f"| {' | '.join(heads)} |", "|-|" + "-:|" * (len(heads) - 1)]
        first = next(iter(updates.values()))
        for name, update in updates.items():
            milliseconds = 1000 * statistics.median(update["seconds"])
            ratios = [a / b for a, b in zip(update["seconds"], first["seconds"], strict=True)]
            size = update["state_bytes"]
            relative_size = size / first["state_bytes"]
            cells = [f"{milliseconds:,.0f}", _spread(ratios)]
            cells += [f"{size / GIB:.2f}", f"{relative_size:.2f}"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(ratios: Sequence[float]) -> str:
    """Format the median and the range over rounds."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _run(module: str, arguments: list[str], variables: Mapping[str, str]) -> Any:
    command = python_module_command(module, *arguments)
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        what = f"{module} {' '.join(arguments)}: process failed (exit code {done.returncode})"
        raise RunError(Problem(what, code="process.failed"))
    return json.loads(done.stdout.splitlines()[-1])
