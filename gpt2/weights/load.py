"""A trained model back from its folder."""

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
    """The model of a run's folder, or of what ``make export`` made of one; on the CPU, evaluating.

    ConfigError where the folder has no configuration that this code understands, or another than
    its weights; PreflightError where they are absent or damaged.
    """
    run = RunDir(Path(path))
    config = read_resolved_config(run)
    model = GPT(config.model)
    if (run.path / source.CONFIG).exists():
        if problems := source.mismatches(run.path, config.model):
            raise ConfigError(*problems)
        fill(model, read_tensors(run.path))
    else:
        _load_ours(model, run.weights)
    return model.eval()


@torch.no_grad()
def _load_ours(model: GPT, path: Path) -> None:
    try:
        weights = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise PreflightError(Problem(f"cannot be read: {error}", str(path))) from None
    own = dict(model.named_parameters())
    if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in own.items()}:
        raise PreflightError(Problem("not the weights of the configuration beside it", str(path)))
    for name, parameter in own.items():
        parameter.copy_(weights[name])
