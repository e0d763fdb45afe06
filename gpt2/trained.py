"""A finished run, opened to be used: its configuration, its model, its tokenizer."""

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
    """What a finished run left; the model is on the device of ``machine``, set to evaluate."""

    run: RunDir
    config: Config
    machine: MachineConfig
    model: GPT
    tokenizer: Tokenizer


def open_trained(run: RunDir, build_dir: Path) -> Trained:
    """Load a finished run; its tokenizer's files lie below ``build_dir``, as DATA_DIR says.

    ConfigError where the run was made by other code, PreflightError where its weights are missing
    or damaged.
    """
    config = read_resolved_config(run)
    words = tokenizer.load(config.data.tokenizer, source.downloads_folder(config.data, build_dir))
    machine = machine_here(config.machine)
    torch.set_num_threads(machine.cpu_threads)
    return Trained(run, config, machine, load_run(run.path).to(machine.device), words)


def machine_here(machine: MachineConfig) -> MachineConfig:
    """The run's own, or the CPU where its device is not here: said, for the bits are others."""
    if machine.device == "cpu" or torch.cuda.is_available():
        return machine
    say("WARN", "trained on a GPU, and here is none: used on the CPU in fp32")
    return replace(machine, device="cpu", precision="fp32")
