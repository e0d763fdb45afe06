"""Benchmark cases: configurations of a single training on the CPU. Imports no torch."""

from gpt2.ablation.resolve import resolve_config
from gpt2.config import Config
from lib.binding import Value
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer, Tree, defconfig_layers
from lib.project import ROOT

_TRAINING: dict[str, Value] = {
    "SINGLE_TRAINING": True,
    "OPTIMIZER_ADAMW": True,
    "DATASET_DEFAULT": True,
    "DEVICE_CPU": True,
    "LOG_INTERVAL": 10,
    # Debug flags distort speed.
    "CHECK_NUMERICS": False,
    "MAX_ITERS": 1000,
}
_ONE_SEQUENCE: dict[str, Value] = {"GLOBAL_BATCH": 1, "BATCH_SIZE": 1, "GRAD_ACCUMULATION": 1}

# name → (defconfig, settings, timed steps of one round)
CASES: dict[str, tuple[str, dict[str, Value], int]] = {
    "124m-fp32": ("gpt2-124m+cpu", {**_ONE_SEQUENCE, "PRECISION_FP32": True}, 2),
    "124m-bf16": ("gpt2-124m+cpu", {**_ONE_SEQUENCE, "PRECISION_BF16": True}, 4),
    "quickstart": ("gpt2-quickstart", {}, 40),
}


def configuration(spec: str, settings: dict[str, Value], threads: int) -> Config:
    """Return the configuration of a case, with ``threads`` CPU threads.

    Raises ConfigError if the configuration enables a debug flag.
    """
    common = Layer.of("command line", "bench", {**_TRAINING, "CPU_THREADS": threads})
    layers = [*defconfig_layers(ROOT, spec), common, Layer.of("command line", "case", settings)]
    config = resolve_config(Tree(), layers)
    if flags := config.numerics.debug_flags:
        what = f"{spec}: debug flags distort timings (expected none, got {flags})"
        raise ConfigError(Problem(what, code="config.conflict"))
    return config
