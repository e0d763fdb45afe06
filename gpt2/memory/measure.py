"""Predicted and real peak memory of training steps on this CPU.

     python -m gpt2.memory.measure [CASE ...]

Each case runs the trainer's step in separate processes, started as the trainer's workers are. Real
peak memory is the maximum resident set minus the resident set before the model is built, of the
process in which it is largest.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch

from gpt2.config import Config
from gpt2.memory.predict import estimate

# Optimizers import it; import it first, so that its memory is not attributed to a step.
from gpt2.study.resolve import resolve_config
from gpt2.training.minimal import MinimalTraining
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import show
from lib.env.machine import worker_environment
from lib.env.process_group import ProcessGroup
from lib.env.ranks import current_process
from lib.project import ROOT, python_module_command
from lib.runner.ranks import run_ranks
from lib.units import GIB

_ADAMW: dict[str, SymbolValue] = {"OPTIMIZER_ADAMW": True, "DROPOUT": "0.0", "PRECISION_FP32": True}
_BF16: dict[str, SymbolValue | None] = {"PRECISION_FP32": None, "PRECISION_BF16": True}
_FSDP: dict[str, SymbolValue | None] = {"DATA_PARALLEL_FSDP": True}
# name → micro-batch, tokens, settings; GPT-2 124M
CASES: dict[str, tuple[int, int, dict[str, SymbolValue | None]]] = {
    "b1-t64-fp32": (1, 64, {}),
    "b1-t1024-fp32": (1, 1024, {}),
    "b1-t1024-bf16": (1, 1024, _BF16),
    "b4-t1024-bf16": (4, 1024, _BF16),
    "b1-t1024-fp32-dropout": (1, 1024, {"DROPOUT": "0.1"}),
    # CPU_OVERHEAD was fitted to the cases above; the following cases validate it.
    "b2-t512-bf16": (2, 512, _BF16),
    "b1-t768-fp32-dropout": (1, 768, {"DROPOUT": "0.1"}),
    "b1-t512-fp32-ra": (1, 512, {"RECIPROCAL": True}),
    "b1-t512-fp32-ddp2": (1, 512, {"GPUS": 2}),
    "b1-t512-fp32-fsdp2": (1, 512, {"GPUS": 2, **_FSDP}),
    "b1-t512-fp32-fsdp4": (1, 512, {"GPUS": 4, **_FSDP}),
    "b1-t512-bf16-fsdp2": (1, 512, {"GPUS": 2, **_BF16, **_FSDP}),
    "b1-t512-fp32-again-fsdp4": (1, 512, {"GPUS": 4, "GRAD_CHECKPOINTING": True, **_FSDP}),
}
# The first step creates the optimizer's state, so the second is the first complete one.
_STEPS = 2


def configuration(case: str) -> Config:
    """Return the configuration of a case."""
    batch, tokens, settings = CASES[case]
    sizes: dict[str, SymbolValue | None] = {
        "SINGLE_TRAINING": True,
        "BLOCK_SIZE": tokens,
        "GLOBAL_BATCH": batch * int(settings.get("GPUS") or 1),
        "BATCH_SIZE": batch,
        "GRAD_ACCUMULATION": 1,
    }
    merged = _ADAMW | sizes | settings
    changes = {name: value for name, value in merged.items() if value is not None}
    layers = [
        *defconfig_layers(ROOT, "gpt2-124m+cpu"),
        ConfigLayer.of("command line", case, changes),
    ]
    return resolve_config(KconfigTree(), layers)


def real_peak_bytes(config: Config) -> int:
    """Run a few steps on random tokens and return this process's peak memory growth.

    The process should be a fresh one.
    """
    torch.set_num_threads(config.machine.cpu_threads)
    group = ProcessGroup.join(current_process())
    before = _resident("VmRSS")
    training = MinimalTraining(config, group=group)
    shape, batch = config.model.shape, config.train.batch_size
    for _ in range(_STEPS):
        tokens = torch.randint(shape.vocab_size, (batch, shape.block_size + 1))
        training.step([tokens])
    return int(group.gather(torch.tensor(_resident("VmHWM") - before)).max())


def measure(case: str) -> tuple[float, float]:
    """Return predicted and real peak memory of a case, in GiB."""
    config = configuration(case)
    command = python_module_command("gpt2.memory.measure", "--real", case)
    variables = {**os.environ, **worker_environment(config.machine)}
    _, real = run_ranks(command, variables, config.train.gpus)
    return estimate(config, "cpu").cpu_peak_bytes / GIB, int(real) / GIB


def main() -> None:
    """Print a table of cases, or with --real the peak bytes of this process as JSON."""
    if sys.argv[1:2] == ["--real"]:
        show(json.dumps(real_peak_bytes(configuration(sys.argv[2]))))
        return
    show(f"{'case':24} predicted GiB  real GiB  real / predicted\n")
    for case in sys.argv[1:] or CASES:
        predicted, real = measure(case)
        show(f"{case:24} {predicted:13.2f} {real:9.2f} {real / predicted:17.2f}\n")


def _resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None, f"this kernel reports no {field}"
    return int(match[1]) * 1024


if __name__ == "__main__":
    main()
