"""Matrices start as in GPT-2, and vectors of a mechanism as its options configure."""

import dataclasses
import math

import torch

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.config import ModelConfig
from gpt2.model import GPT
from gpt2.zero_linear import ZeroLinear

# Elements that determine a standard deviation to 3 %, and the relative tolerance.
_MIN_ELEMENTS = 500
_STD_TOLERANCE = 0.15
# Vectors without an option: weights of norms, and factors, which start as the identity.
_STARTS = {"weight": 1.0, "factors": 1.0}


def initial(subject: Subject) -> list[Finding]:
    """Check the initial weights of the model."""
    config = subject.exact.model
    model = GPT(config)
    model.init_weights(subject.exact.seed)
    return _matrices(model, config) + _vectors(model, config)


def _matrices(model: GPT, config: ModelConfig) -> list[Finding]:
    """Check the standard deviation of initial matrices.

    It is 0.02, and 0.02 / √(2·n_layer) into the residual stream; a ZeroLinear starts at 0.
    """
    shape = config.shape
    zero = [f"{path}.weight" for path, m in model.named_modules() if isinstance(m, ZeroLinear)]
    for name, parameter in model.named_parameters():
        weights = parameter[: shape.vocab_size] if name == "wte.weight" else parameter
        std = 0.02 / math.sqrt(2 * shape.n_layer) if name.endswith("c_proj.weight") else 0.02
        if name in zero and bool(weights.any()):
            return [Finding("initial-zero", f"0 in the initial {name}", "nonzero values")]
        if name in zero or weights.ndim < 2 or weights.numel() < _MIN_ELEMENTS:
            continue
        if abs(float(weights.detach().std()) / std - 1) > _STD_TOLERANCE:
            text = f"{float(weights.detach().std()):.4f}"
            expected = f"a standard deviation of {std:.4f} of the initial {name}"
            return [Finding("initial-std", expected, text)]
    return []


def _vectors(model: GPT, config: ModelConfig) -> list[Finding]:
    """Check initial vectors.

    A vector starts at the option of the same name, a norm at 1, and any other vector at 0.
    """
    starts = dict(_STARTS)
    for component in (*config.attention.terms, *config.attention.gates, *config.mlp.mechanisms):
        assert dataclasses.is_dataclass(component)
        values = {
            field.name: vars(component)[field.name] for field in dataclasses.fields(component)
        }
        starts |= {f"{component.name}.{name}": value for name, value in values.items()}
    findings = []
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            continue
        parts = name.split(".")
        expected = starts.get(".".join(parts[-2:]), starts.get(parts[-1], 0.0))
        if name.endswith("gates.bias"):
            # Each of the c gates of a head starts at σ(b) = 1/c, so that their sum is a mean.
            expected = -math.log(parameter.numel() / config.shape.n_head - 1)
        if not torch.allclose(parameter, torch.full_like(parameter, expected), rtol=1e-6, atol=0.0):
            text = f"{float(parameter.detach().mean()):g}"
            findings.append(Finding("initial-value", f"{expected:g} in the initial {name}", text))
    return findings
