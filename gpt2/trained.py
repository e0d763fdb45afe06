"""Loading of a finished run for inference: configuration, model and tokenizer."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpt2.config import Config
from gpt2.data import source, tokenizer
from gpt2.data.tokenizer import Tokenizer
from gpt2.model import GPT
from gpt2.runs import read_resolved_config
from gpt2.weights.load import load_run
from lib.console import say
from lib.machine.options import MachineConfig
from lib.rundir import RunDir


@dataclass(frozen=True)
class Trained:
    """A finished run; the model is in eval mode on the device of ``machine``."""

    run: RunDir
    config: Config
    machine: MachineConfig
    model: GPT
    tokenizer: Tokenizer


def open_trained(run: RunDir, build_dir: Path) -> Trained:
    """Load a finished run; DATA_DIR of the tokenizer files is relative to ``build_dir``.

    Raises ConfigError if the run was made by other code, PreflightError if its weights are missing
    or damaged.
    """
    config = read_resolved_config(run)
    downloads = source.downloads_folder(config.data, build_dir)
    vocabulary = tokenizer.load(config.data.tokenizer, downloads)
    machine = machine_here(config.machine)
    torch.set_num_threads(machine.cpu_threads)
    return Trained(run, config, machine, load_run(run.path).to(machine.device), vocabulary)


def machine_here(machine: MachineConfig) -> MachineConfig:
    """Return ``machine``, or its CPU fallback if no GPU is available.

    The fallback logs a warning, because its results differ in the last bits.
    """
    if machine.device == "cpu" or torch.cuda.is_available():
        return machine
    say("WARN", "trained on a GPU, but no GPU is available: using the CPU in fp32")
    return replace(machine, device="cpu", precision="fp32")
