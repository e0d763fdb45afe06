"""A finished run for inference: its configuration, model and tokenizer."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpt2.config import Config
from gpt2.data import tokenizer
from gpt2.data.tokenizer import Tokenizer
from gpt2.model import GPT
from gpt2.records.files import read_resolved_config
from gpt2.weights.convert import model_of, read_tensors
from gpt2.weights.match import weight_mismatches
from gpt2.weights.source import CONFIG_FILE
from lib.console import log
from lib.env.options import MachineConfig
from lib.errors import ConfigError, PreflightError, Problem
from lib.runs.run_dir import RunDir


def load_run(path: str | Path) -> GPT:
    """Load a run directory or an export, on the CPU in evaluation mode. Raises ConfigError, PreflightError."""
    folder = Path(path)
    config = read_resolved_config(RunDir(folder))
    is_export = (folder / CONFIG_FILE).exists()
    if is_export and (problems := weight_mismatches(folder, config.model)):
        raise ConfigError(*problems)
    # An export has merged weights.
    options = replace(config.model, adapters=()) if is_export else config.model
    model, missing = model_of(options, read_tensors(folder))
    if missing:
        what = f"tensors do not match the configuration in the same folder: no {missing[0]}"
        raise PreflightError(Problem(what, str(folder), code="weights.shape-mismatch"))
    return model.eval()


@dataclass(frozen=True)
class Trained:
    """A finished run; the model is in eval mode on the device of ``machine``."""

    config: Config
    machine: MachineConfig
    model: GPT
    tokenizer: Tokenizer


def open_trained(run: RunDir, build_dir: Path) -> Trained:
    """Load a finished run, with its tokenizer. Raises ConfigError or PreflightError."""
    config = read_resolved_config(run, build_dir)
    vocabulary = tokenizer.load_tokenizer(config.data.tokenizer, config.data.folder(build_dir))
    machine = machine_here(config.machine)
    torch.set_num_threads(machine.cpu_threads)
    return Trained(config, machine, load_run(run.path).to(machine.device), vocabulary)


def machine_here(machine: MachineConfig) -> MachineConfig:
    """Return ``machine``, or, with a warning, the CPU in fp32 if no GPU is available."""
    if machine.device == "cpu" or torch.cuda.is_available():
        return machine
    log("WARN", "trained on a GPU, but no GPU is available: using the CPU in fp32")
    return replace(machine, device="cpu", precision="fp32")
