"""Loading of a trained model from its run directory or from an exported folder."""

from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch

from gpt2.config import Config
from gpt2.data import tokenizer
from gpt2.data.dataset import data_folder
from gpt2.data.tokenizer import Tokenizer
from gpt2.model import GPT
from gpt2.records.files import read_resolved_config
from gpt2.weights import source
from gpt2.weights.convert import copy_weights, read_tensors
from lib.console import log
from lib.env.options import MachineConfig
from lib.errors import ConfigError, PreflightError, Problem
from lib.files import regular_path
from lib.runs.run_dir import RunDir


def load_run(path: str | Path) -> GPT:
    """Load a model from a run directory or an exported folder, on the CPU in evaluation mode.

    Raises ConfigError if the folder has no valid configuration or the configuration does not match
    the weights, PreflightError if the weights are missing or damaged.
    """
    run = RunDir(Path(path))
    config = read_resolved_config(run)
    model = GPT(config.model)
    if (run.path / source.CONFIG_FILE).exists():
        if problems := source.weight_mismatches(run.path, config.model):
            raise ConfigError(*problems)
        copy_weights(model, read_tensors(run.path), native=source.is_native(run.path))
    else:
        _load_native(model, run.weights)
    return model.eval()


@torch.no_grad()
def _load_native(model: GPT, path: Path) -> None:
    try:
        weights = safetensors.torch.load_file(regular_path(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise PreflightError(
            Problem(f"cannot be read: {error}", str(path), code="weights.damaged")
        ) from None
    parameters = dict(model.named_parameters())
    if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in parameters.items()}:
        what = "tensors do not match the configuration in the same folder"
        raise PreflightError(Problem(what, str(path), code="weights.shape-mismatch"))
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


# Loading of a finished run for inference: configuration, model and tokenizer.


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
    config = read_resolved_config(run, build_dir)
    data_dir = data_folder(config.data, build_dir)
    vocabulary = tokenizer.load_tokenizer(config.data.tokenizer, data_dir)
    machine = machine_here(config.machine)
    torch.set_num_threads(machine.cpu_threads)
    return Trained(run, config, machine, load_run(run.path).to(machine.device), vocabulary)


def machine_here(machine: MachineConfig) -> MachineConfig:
    """Return ``machine``, or its CPU fallback if no GPU is available.

    The fallback logs a warning, because its results differ in the last bits.
    """
    if machine.device == "cpu" or torch.cuda.is_available():
        return machine
    log("WARN", "trained on a GPU, but no GPU is available: using the CPU in fp32")
    return replace(machine, device="cpu", precision="fp32")
