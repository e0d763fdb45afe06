"""Loading of a trained model from its run directory or from an exported folder."""

from pathlib import Path

import safetensors.torch
import torch

from gpt2.model import GPT
from gpt2.runs import read_resolved_config
from gpt2.weights import source
from gpt2.weights.hf import fill, read_tensors
from lib.errors import ConfigError, PreflightError, Problem
from lib.rundir import RunDir


def load_run(path: str | Path) -> GPT:
    """Load a model from a run directory or an exported folder, on the CPU in evaluation mode.

    Raises ConfigError if the folder has no valid configuration or the configuration does not match
    the weights, PreflightError if the weights are missing or damaged.
    """
    run = RunDir(Path(path))
    config = read_resolved_config(run)
    model = GPT(config.model)
    if (run.path / source.CONFIG).exists():
        if problems := source.mismatches(run.path, config.model):
            raise ConfigError(*problems)
        fill(model, read_tensors(run.path))
    else:
        _load_native(model, run.weights)
    return model.eval()


@torch.no_grad()
def _load_native(model: GPT, path: Path) -> None:
    try:
        weights = safetensors.torch.load_file(path)
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
