"""Interleaved timing of the benchmark sides (A B A B), with tables of medians and ratios.

Imports no torch.
"""

import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.bench.cases import CASES, configuration
from gpt2.data.prepare import prepare
from lib.console import say
from lib.errors import Problem, RunError
from lib.machine.gpus import GIB
from lib.machine.setup import environment
from lib.modules import module_command


@dataclass(frozen=True)
class Comparison:
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


def compare(case: str, threads: int, rounds: int, build_dir: Path) -> Comparison:
    """Time the sides of ``case`` in ``rounds`` ≥ 1 rounds. Raises RunError if a side fails."""
    spec, settings, steps = CASES[case]
    config = configuration(spec, settings, threads)
    prepare(config.data, build_dir)
    tokens = config.train.tokens_per_iteration(config.model.shape.block_size)
    # The trainer starts its workers with these variables; a plain loop is started without them.
    tuned = environment(config.machine)
    sides = {"ours": ("ours", tuned), "plain": ("plain", {}), "tuned": ("plain", tuned)}
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for count in range(rounds):
        for side, (loop, variables) in sides.items():
            args = [loop, case, str(threads), str(steps), str(build_dir)]
            seconds = _run("gpt2.bench.sides", args, variables)
            speeds[side].append(tokens / statistics.median(seconds))
        last = ", ".join(f"{side} {values[-1]:,.0f}" for side, values in speeds.items())
        say("BENCH", f"{case} {count + 1}/{rounds}   {last} tok/s")
    ratios, tuned_ratios = (
        tuple(a / b for a, b in zip(speeds["ours"], speeds[other], strict=True))
        for other in ("plain", "tuned")
    )
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    return Comparison(case, **medians, ratios=ratios, tuned_ratios=tuned_ratios)


def mechanisms(threads: int, rounds: int) -> Mapping[str, Any]:
    """Run ``gpt2.bench.mechanisms`` in a separate process.

    Returns tokens → step → forward and backward times of each round, relative to the baseline.
    """
    say("BENCH", "forward and backward of every mechanism")
    ratios: Mapping[str, Any] = _run("gpt2.bench.mechanisms", [str(threads), str(rounds)], {})
    return ratios


def optimizers(threads: int, rounds: int) -> Mapping[str, Any]:
    """Run ``gpt2.bench.optimizers`` in a separate process.

    Returns optimizer → seconds of an update in each round, and bytes of state.
    """
    say("BENCH", "an update of every optimizer")
    updates: Mapping[str, Any] = _run("gpt2.bench.optimizers", [str(threads), str(rounds)], {})
    return updates


def to_markdown(
    comparisons: list[Comparison], relative: Mapping[str, Any], updates: Mapping[str, Any]
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
    command = module_command(module, *arguments)
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        what = f"{module} {' '.join(arguments)}: process failed (exit code {done.returncode})"
        raise RunError(Problem(what, code="process.failed"))
    return json.loads(done.stdout.splitlines()[-1])
