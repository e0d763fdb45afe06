"""Weights start where GPT-2's do, and vectors of a mechanism where its options say."""

import dataclasses
import math

import torch

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.config import ModelConfig
from gpt2.model import GPT
from gpt2.zero_linear import ZeroLinear

# Elements of which a standard deviation is known to 3 %, and what is allowed.
_FEWEST = 500
_SPREAD = 0.15
# Vectors that no option names: of norms; factors, which leave all as it was.
_STARTS = {"weight": 1.0, "factors": 1.0}


def initial(subject: Subject) -> list[Finding]:
    """Of the model as it is before training."""
    config = subject.exact.model
    model = GPT(config)
    model.init_weights(subject.exact.seed)
    return _matrices(model, config) + _vectors(model, config)


def _matrices(model: GPT, config: ModelConfig) -> list[Finding]:
    """At 0.02, those into the residual stream at 0.02 / √(2·n_layer); what is to start at 0, at 0."""
    shape = config.shape
    zero = [f"{path}.weight" for path, m in model.named_modules() if isinstance(m, ZeroLinear)]
    for name, parameter in model.named_parameters():
        weights = parameter[: shape.vocab_size] if name == "wte.weight" else parameter
        wanted = 0.02 / math.sqrt(2 * shape.n_layer) if name.endswith("c_proj.weight") else 0.02
        if name in zero and bool(weights.any()):
            return [Finding(f"0 in the initial {name}", "other numbers")]
        if name in zero or weights.ndim < 2 or weights.numel() < _FEWEST:
            continue
        if abs(float(weights.detach().std()) / wanted - 1) > _SPREAD:
            text = f"{float(weights.detach().std()):.4f}"
            return [Finding(f"a standard deviation of {wanted:.4f} of the initial {name}", text)]
    return []


def _vectors(model: GPT, config: ModelConfig) -> list[Finding]:
    """At the number of the same name among the part's options, norms at 1, all else at 0."""
    starts = dict(_STARTS)
    for part in (*config.attention.terms, *config.attention.gates, *config.mlp.mechanisms):
        assert dataclasses.is_dataclass(part)
        numbers = {field.name: vars(part)[field.name] for field in dataclasses.fields(part)}
        starts |= {f"{part.name}.{name}": number for name, number in numbers.items()}
    found = []
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            continue
        words = name.split(".")
        wanted = starts.get(".".join(words[-2:]), starts.get(words[-1], 0.0))
        if name.endswith("gates.bias"):
            # Each of c gates for a head begins with σ(b) = 1/c: their sum is a mean.
            wanted = -math.log(parameter.numel() / config.shape.n_head - 1)
        if not torch.allclose(parameter, torch.full_like(parameter, wanted), rtol=1e-6, atol=0.0):
            text = f"{float(parameter.detach().mean()):g}"
            found.append(Finding(f"{wanted:g} in the initial {name}", text))
    return found
