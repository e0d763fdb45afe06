"""The benchmarks: of a training step, of sparse attention, of a GPU. Imports no torch."""

import argparse
import json
import os
from collections.abc import Mapping
from typing import NoReturn

from gpt2.config import Config
from gpt2.study.arguments import asked_plan
from gpt2.study.resolve import resolve_step
from gpt2.study.study_file import RATIO
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.env.machine import MALLOC_VARIABLES, worker_environment
from lib.errors import ConfigError, Problem
from lib.project import ROOT, python_module_command

_STEP_ROUNDS, _GPU_ROUNDS, _NSA_SHORTEST = 20, 10, 512

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
    return resolve_step(KconfigTree(), ratio_layers(symbols), RATIO, RATIO.step(slug))[1]


def bench_step(args: argparse.Namespace) -> NoReturn:
    """Time the trainer's step of the first run of .config, beside plain loops.

    kablate bench
    kablate bench --steps ra --iters 50
    kablate bench --gpu 1               the tables of docs/gpu.md on this GPU, in 8 minutes

    The trainer's step on drawn tokens, with the mechanisms of the run, beside transformers' GPT-2 and a
    GPT-2 in nanoGPT's form, of the same sizes and without mechanisms. With --gpu 1, which reads no
    .config: steps of GPT-2 124M, the loss, sparse attention and a training, beside the forms of others.

    The sides of a case take turns; figures are medians, ratios are within one round. There is no pass
    or fail; stop other load on the machine first. To compare settings: kablate plan --probe --sweep.
    """
    if args.gpu == "1":
        request, config = {"kind": "gpu", "rounds": args.iters or _GPU_ROUNDS}, step_config(
            "baseline", {}
        )
    elif args.gpu:
        what, fix = f"expected 1, got {args.gpu}", f"elsewhere: make plan GPU={args.gpu}"
        raise ConfigError(Problem(what, "GPU", fix, code="usage.out-of-range"))
    else:
        run = asked_plan(args).runs[0]
        config = run.config
        request = {"kind": "step", "rounds": args.iters or _STEP_ROUNDS, "label": run.label}
    if config.numerics.detect_anomaly:
        what = "DETECT_ANOMALY: debugging distorts timings (expected n, got y)"
        raise ConfigError(Problem(what, next="type: SET=DETECT_ANOMALY=n", code="config.conflict"))
    if config.train.gpus > 1:
        what = f"expected 1, got {config.train.gpus}"
        raise ConfigError(Problem(what, "GPUS", "type: make bench GPUS=1", code="config.conflict"))
    request |= {"json": args.json, "values": dict(config.values)}
    _replace_process(request, worker_environment(config.machine))


def bench_nsa(args: argparse.Namespace) -> NoReturn:
    """Time sparse against full attention, for whole sequences and decoding, on one thread of a CPU.

    kablate bench-nsa --tokens 2048        the longest sequence; --rounds 5 for publication
    """
    if args.tokens < _NSA_SHORTEST:
        what = f"expected at least {_NSA_SHORTEST}, got {args.tokens}"
        raise ConfigError(Problem(what, "TOKENS", code="usage.out-of-range"))
    request = {"kind": "nsa", "rounds": args.rounds, "json": args.json, "longest": args.tokens}
    _replace_process(request, {"OMP_NUM_THREADS": "1", **MALLOC_VARIABLES})


def _replace_process(request: Mapping[str, object], variables: Mapping[str, str]) -> NoReturn:
    # Libraries read the variables when they are loaded.
    command = python_module_command("gpt2.bench.run", json.dumps(request))
    os.execve(command[0], command, {**os.environ, **variables})
