"""Reference MLP, built from the references of its mechanisms.

B batch, T tokens, C n_embd, M hidden units. It shares no code with the trained model and is
differentiable in any float dtype. The options of a mechanism compute the mechanism's formula.
"""

from collections.abc import Mapping
from math import pi, sqrt

import torch
from torch import Tensor

from gpt2.attention.state import AttentionOutputs, BlockState
from gpt2.mlp.config import MlpConfig
from gpt2.mlp.options import LayerSpec


def mlp(
    x_BTC: Tensor,
    view: AttentionOutputs,
    parameters: Mapping[str, Tensor],
    site: LayerSpec,
    config: MlpConfig,
) -> tuple[Tensor, BlockState]:
    """Return a block's MLP output without dropout and the state for the next block.

    ``parameters`` are those of the built MLP, by name.
    """
    state = BlockState()
    h_BTM = gelu(_linear(x_BTC, parameters, "c_fc"), site.shape.activation)
    for options in config.built(site):
        prefix = f"mechanisms.{options.name}."
        weights = {
            name.removeprefix(prefix): value
            for name, value in parameters.items()
            if name.startswith(prefix)
        }
        h_BTM = options.reference_apply(h_BTM, view, state, weights, site)
    return _linear(h_BTM, parameters, "c_proj"), state


def gelu(x: Tensor, activation: str) -> Tensor:
    """Return x Φ(x) or its tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    if activation == "gelu_exact":
        return x * (1 + torch.erf(x / sqrt(2))) / 2
    return x * (1 + torch.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2


def _linear(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    out = x @ parameters[f"{name}.weight"].T
    return out + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else out
