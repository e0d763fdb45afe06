"""The benchmarks of ``scripts/bench.py``: arguments and tables. Imports no torch."""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import NoReturn

from gpt2.bench.runner import median_and_range, within_rounds
from gpt2.planning.arguments import (
    CommandParser,
    add_json,
    add_selection,
    add_variable,
    asked_plan,
    whole_number,
)
from lib.env.gpu import cpu_model
from lib.env.machine import MALLOC_VARIABLES, worker_environment
from lib.errors import ConfigError, Problem, RunError
from lib.project import python_module_command
from lib.report.figures import load_pyplot
from lib.report.render import json_document, markdown_table
from lib.runner.ranks import run_ranks

_STEP_ROUNDS = 20
_NSA_LONGEST, _NSA_SHORTEST, _NSA_ROUNDS = 16384, 512, 5


def add_step_arguments(parser: CommandParser) -> None:
    """Add the arguments of ``bench_step``."""
    add_selection(parser)
    add_json(parser)
    add_variable(parser, "iters", f"rounds (default {_STEP_ROUNDS})")


def bench_step(args: argparse.Namespace) -> str:
    """Time the first run of the plan beside plain loops; return a table, or JSON."""
    rounds = whole_number(args.iters or str(_STEP_ROUNDS), "ITERS", 1)
    run, config = (plan := asked_plan(args)[1]).runs[0], plan.runs[0].config
    if config.numerics.detect_anomaly:
        what = "DETECT_ANOMALY: debugging distorts timings (expected n, got y)"
        raise ConfigError(Problem(what, next="type: SET=DETECT_ANOMALY=n", code="config.conflict"))
    if config.train.gpus > 1:
        what = f"expected 1, got {config.train.gpus}"
        raise ConfigError(Problem(what, "GPUS", "type: make bench GPUS=1", code="config.conflict"))
    command = python_module_command("gpt2.bench.step", str(rounds))
    variables = {**os.environ, **worker_environment(config.machine)}
    code, output = run_ranks(command, variables, 1, json.dumps(dict(config.values)))
    if code:
        what = f"the benchmark failed with exit code {code}"
        raise RunError(Problem(what, run.label, code="process.failed"))
    times: dict[str, list[float]] = json.loads(output)
    device = cpu_model() if config.machine.device == "cpu" else config.machine.device
    machine = f"{device}, torch {version('torch')}"
    if args.json:
        return json_document(1, {"run": run.label, "machine": machine, "seconds": times})
    tokens = config.train.tokens_per_iteration(config.model.shape.block_size)
    title = f"{run.label} on {machine}, medians of {rounds} rounds (range)"
    return f"{title}\n\n{step_table(times, tokens)}"


def step_table(times: Mapping[str, Sequence[float]], tokens: int) -> str:
    """Return a Markdown table of the seconds of each round by side, for a step of ``tokens``."""
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratio = median_and_range(within_rounds(seconds, times["trainer"]))
        rows.append([name, f"{1000 * median:,.1f}", f"{tokens / median:,.0f}", ratio])
    return markdown_table(["side", "step ms", "tok/s", "time / trainer"], rows)


def add_nsa_arguments(parser: CommandParser) -> None:
    """Add the arguments of ``bench_nsa``."""
    add_json(parser)
    add_variable(parser, "tokens", f"longest sequence (default {_NSA_LONGEST})")
    text = "at least 1; 5 for publication"
    parser.add_argument("--rounds", type=int, default=_NSA_ROUNDS, help=text)


def bench_nsa(args: argparse.Namespace) -> NoReturn:
    """Replace this process by the benchmark, in the environment of the trainer's workers."""
    longest = whole_number(args.tokens or str(_NSA_LONGEST), "TOKENS")
    if longest < _NSA_SHORTEST or args.rounds < 1:
        expected = f"TOKENS >= {_NSA_SHORTEST} and --rounds >= 1"
        what = f"expected {expected}, got {longest} and {args.rounds}"
        raise ConfigError(Problem(what, "TOKENS, --rounds", code="usage.out-of-range"))
    # Fail before the measurement if matplotlib is missing.
    load_pyplot()
    form = "json" if args.json else "table"
    command = python_module_command(
        "gpt2.bench.nsa", str(longest), str(args.rounds), form, str(args.build_dir)
    )
    os.execve(command[0], command, {**os.environ, "OMP_NUM_THREADS": "1", **MALLOC_VARIABLES})
