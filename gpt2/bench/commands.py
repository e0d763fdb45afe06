"""The benchmarks of ``scripts/bench.py``: arguments. Imports no torch."""

import argparse
import json
import os
from collections.abc import Mapping
from typing import NoReturn

from gpt2.config import Config
from gpt2.planning.arguments import (
    CommandParser,
    add_json,
    add_selection,
    add_variable,
    asked_plan,
    whole_number,
)
from gpt2.study.resolve import resolve_step
from gpt2.study.study_file import RATIO
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.env.machine import MALLOC_VARIABLES, worker_environment
from lib.errors import ConfigError, Problem
from lib.project import ROOT, python_module_command

_STEP_ROUNDS, _NSA_ROUNDS, _GPU_ROUNDS = 20, 5, 10
_NSA_LONGEST, _NSA_SHORTEST = 16384, 512


Symbols = Mapping[str, SymbolValue]
# One micro-batch of 32 sequences, and the same optimizer on every side.
_STEP: Symbols = {
    "BATCH_SIZE": 32,
    "GRAD_ACCUMULATION": 1,
    "GLOBAL_BATCH": 32,
    "OPTIMIZER_ADAMW": True,
}


def ratio_layers(symbols: Symbols) -> list[ConfigLayer]:
    """Return the configuration of the RATIO study with the changes ``symbols``."""
    changes = ConfigLayer.of("command line", "bench", {**_STEP, **symbols})
    return [*defconfig_layers(ROOT, "gpt2-ratio-ablation"), changes]


def step_config(slug: str, symbols: Symbols) -> Config:
    """Return a step of the RATIO study with the changes ``symbols``."""
    return resolve_step(KconfigTree(), ratio_layers(symbols), RATIO, RATIO.step(slug)).config


def add_step_arguments(parser: CommandParser) -> None:
    """Add the arguments of ``bench_step``."""
    add_selection(parser)
    add_json(parser)
    add_variable(parser, "iters", f"rounds (default {_STEP_ROUNDS})")
    add_variable(parser, "gpu", "1: the tables of docs/gpu.md, on this GPU; .config is not read")


def bench_step(args: argparse.Namespace) -> NoReturn:
    """Replace this process by the benchmark of the plan's first run, or of the GPU."""
    if args.gpu not in ("", "1"):
        what, fix = f"expected 1, got {args.gpu}", f"elsewhere: make plan GPU={args.gpu}"
        raise ConfigError(Problem(what, "GPU", fix, code="usage.out-of-range"))
    rounds = whole_number(args.iters or str(_GPU_ROUNDS if args.gpu else _STEP_ROUNDS), "ITERS", 1)
    if args.gpu:
        config = step_config("baseline", {})
        request = {"kind": "gpu", "rounds": rounds, "json": args.json}
        _start(request, config)
    run, config = (plan := asked_plan(args)[1]).runs[0], plan.runs[0].config
    if config.numerics.detect_anomaly:
        what = "DETECT_ANOMALY: debugging distorts timings (expected n, got y)"
        raise ConfigError(Problem(what, next="type: SET=DETECT_ANOMALY=n", code="config.conflict"))
    if config.train.gpus > 1:
        what = f"expected 1, got {config.train.gpus}"
        raise ConfigError(Problem(what, "GPUS", "type: make bench GPUS=1", code="config.conflict"))
    _start({"kind": "step", "rounds": rounds, "json": args.json, "label": run.label}, config)


def _start(request: dict[str, object], config: Config) -> NoReturn:
    variables = worker_environment(config.machine)
    _replace_process({**request, "values": dict(config.values)}, variables)


def add_nsa_arguments(parser: CommandParser) -> None:
    """Add the arguments of ``bench_nsa``."""
    add_json(parser)
    add_variable(parser, "tokens", f"longest sequence (default {_NSA_LONGEST})")
    text = "at least 1; 5 for publication"
    parser.add_argument("--rounds", type=int, default=_NSA_ROUNDS, help=text)


def bench_nsa(args: argparse.Namespace) -> NoReturn:
    """Replace this process by the benchmark of sparse attention, on one thread of a CPU."""
    longest = whole_number(args.tokens or str(_NSA_LONGEST), "TOKENS")
    if longest < _NSA_SHORTEST or args.rounds < 1:
        expected = f"TOKENS >= {_NSA_SHORTEST} and --rounds >= 1"
        what = f"expected {expected}, got {longest} and {args.rounds}"
        raise ConfigError(Problem(what, "TOKENS, --rounds", code="usage.out-of-range"))
    request = {"kind": "nsa", "rounds": args.rounds, "json": args.json, "longest": longest}
    _replace_process(request, {"OMP_NUM_THREADS": "1", **MALLOC_VARIABLES})


def _replace_process(request: dict[str, object], variables: dict[str, str]) -> NoReturn:
    # Libraries read the variables when they are loaded.
    command = python_module_command("gpt2.bench.run", json.dumps(request))
    os.execve(command[0], command, {**os.environ, **variables})
