"""Runs the sides in turn, A B A B, and tabulates medians and ratios; imports no torch."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.bench.cases import CASES, configuration
from gpt2.data.prepare import prepare
from lib.console import say
from lib.errors import RunError
from lib.machine.setup import environment


@dataclass(frozen=True)
class Comparison:
    """One case: tokens per second of both sides, and ours / plain of each round."""

    case: str
    ours: float
    plain: float
    ratios: tuple[float, ...]


def compare(case: str, threads: int, rounds: int, build_dir: Path) -> Comparison:
    """Time both sides of ``case`` in ``rounds`` rounds. RunError where a side fails."""
    spec, settings, steps = CASES[case]
    config = configuration(spec, settings, threads)
    prepare(config.data, build_dir)
    tokens = config.train.tokens_per_iteration(config.model.shape.block_size)
    # The trainer's workers are started with these; a plain loop is started with none.
    started_with = {"ours": environment(config.machine), "plain": {}}
    speeds: dict[str, list[float]] = {"ours": [], "plain": []}
    for count in range(rounds):
        for side, variables in started_with.items():
            arguments = [side, case, str(threads), str(steps), str(build_dir)]
            seconds = _run("gpt2.bench.sides", arguments, variables)
            speeds[side].append(tokens / statistics.median(seconds))
        ours, plain = speeds["ours"][-1], speeds["plain"][-1]
        say("BENCH", f"{case} {count + 1}/{rounds}   {ours:,.0f} against {plain:,.0f} tok/s")
    ratios = tuple(a / b for a, b in zip(speeds["ours"], speeds["plain"], strict=True))
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    return Comparison(case, medians["ours"], medians["plain"], ratios)


def mechanisms(threads: int, rounds: int) -> Mapping[str, Any]:
    """``gpt2.bench.mechanisms`` in a process of its own: tokens → step → forward, backward."""
    say("BENCH", "forward and backward of every mechanism")
    found: Mapping[str, Any] = _run("gpt2.bench.mechanisms", [str(threads), str(rounds)], {})
    return found


def to_markdown(comparisons: list[Comparison], relative: Mapping[str, Any]) -> str:
    """Both tables."""
    lines = ["| case | ours tok/s | plain tok/s | ours / plain | rounds |", "|-|-:|-:|-:|-|"]
    for c in comparisons:
        spread = f"{min(c.ratios):.2f} to {max(c.ratios):.2f}"
        ratio = statistics.median(c.ratios)
        lines.append(f"| {c.case} | {c.ours:,.0f} | {c.plain:,.0f} | {ratio:.2f} | {spread} |")
    if relative:
        heads = [f"T={tokens} {part}" for tokens in relative for part in ("forward", "backward")]
        lines += ["", f"| step | {' | '.join(heads)} |", "|-|" + "-:|" * len(heads)]
        for slug in next(iter(relative.values())):
            cells = [
                f"{r[slug][p]:.2f}" for r in relative.values() for p in ("forward", "backward")
            ]
            lines.append(f"| {slug} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _run(module: str, arguments: list[str], variables: Mapping[str, str]) -> Any:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RunError(f"{module} {' '.join(arguments)} ended with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
