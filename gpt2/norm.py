"""Norms of the residual stream: before attention, before the MLP and before the head; and formulas.

B batch, T tokens, C n_embd.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.model_config import LayernormOptions, NormOptions, RmsnormOptions
from gpt2.shape import ModelShape

# GPT-2's.
_EPSILON = 1e-5


MODULES: dict[type[Any], Callable[[ModelShape], nn.Module]] = {
    LayernormOptions: lambda shape: nn.LayerNorm(shape.n_embd, _EPSILON, bias=shape.bias),
    RmsnormOptions: lambda shape: nn.RMSNorm(shape.n_embd, _EPSILON),
}


def build_norm(shape: ModelShape, options: NormOptions) -> nn.Module:
    return MODULES[type(options)](shape)


def reference_layernorm(x_BTC: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return g ⊙ (x − mean x) / √(var x + 10⁻⁵) + b, with the biased variance."""
    centred_BTC = x_BTC - x_BTC.mean(-1, keepdim=True)
    scaled_BTC = centred_BTC / torch.sqrt((centred_BTC**2).mean(-1, keepdim=True) + 1e-5)
    return scaled_BTC * parameters["weight"] + parameters.get("bias", 0)


def reference_rmsnorm(x_BTC: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return g ⊙ x / √(mean x² + 10⁻⁵)."""
    length_BT1 = (x_BTC * x_BTC).sum(-1, keepdim=True)
    return x_BTC * parameters["weight"] / torch.sqrt(length_BT1 / x_BTC.shape[-1] + 1e-5)


REFERENCES: dict[type[Any], Callable[[Tensor, Mapping[str, Tensor]], Tensor]] = {
    LayernormOptions: reference_layernorm,
    RmsnormOptions: reference_rmsnorm,
}
