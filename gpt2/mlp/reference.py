"""Reference MLP, built from the references of its mechanisms.

B batch, T tokens, C n_embd, M hidden units. It shares no code with the trained model and is
differentiable in any float dtype. The formula of a mechanism is in the ``reference.py`` of
its folder.
"""

from collections.abc import Callable, Mapping
from math import pi, sqrt
from typing import Any

from torch import Tensor

from gpt2.attention.state import AttentionOutputs, AttentionWeightsOptions, BlockState
from gpt2.mlp.activations import GeluExactOptions, GeluTanhOptions
from gpt2.mlp.config import MlpConfig
from gpt2.mlp.mlp_attn_gate import reference as mlp_attn_gate
from gpt2.mlp.mlp_attn_gate.options import MlpAttnGateOptions
from gpt2.mlp.mlp_cross_token import reference as mlp_cross_token
from gpt2.mlp.mlp_cross_token.options import MlpCrossTokenOptions
from gpt2.mlp.mlp_latent import reference as mlp_latent
from gpt2.mlp.mlp_latent.options import MlpLatentOptions
from gpt2.mlp.options import LayerSpec

# The order in which mechanisms transform the hidden layer (docs/mechanisms/mlp.md).
_ORDER = ("mlp_cross_token", "mlp_latent", "mlp_attn_gate")


def gelu_tanh(x: Tensor) -> Tensor:
    """Return x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    return x * (1 + (sqrt(2 / pi) * (x + 0.044715 * x**3)).tanh()) / 2


def gelu_exact(x: Tensor) -> Tensor:
    """Return x (1 + erf(x / √2)) / 2."""
    return x * (1 + (x / sqrt(2)).erf()) / 2


FUNCTIONS: dict[type[Any], Callable[[Tensor], Tensor]] = {
    GeluTanhOptions: gelu_tanh,
    GeluExactOptions: gelu_exact,
}
# Called with the hidden layer, the view of attention, the state for the next block, the mechanism's
# parameters by name, its options and the site. They return the new hidden layer, and write what the
# next block reads to the state.
REFERENCES: dict[type[Any], Callable[..., Tensor]] = {
    MlpCrossTokenOptions: mlp_cross_token.apply,
    MlpLatentOptions: mlp_latent.apply,
    MlpAttnGateOptions: mlp_attn_gate.apply,
}
# The attention weights that a formula reads, of the formulas that read any.
REQUESTS: dict[type[Any], Callable[[Any], AttentionWeightsOptions]] = {
    MlpCrossTokenOptions: mlp_cross_token.request,
}


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
    h_BTM = FUNCTIONS[type(config.activation)](_linear(x_BTC, parameters, "c_fc"))
    for options in sorted(config.built(site), key=lambda options: _ORDER.index(options.name)):
        prefix = f"mechanisms.{options.name}."
        weights = {
            name.removeprefix(prefix): value
            for name, value in parameters.items()
            if name.startswith(prefix)
        }
        h_BTM = REFERENCES[type(options)](h_BTM, view, state, weights, options, site)
    return _linear(h_BTM, parameters, "c_proj"), state


def requested_weights(site: LayerSpec, config: MlpConfig) -> AttentionWeightsOptions | None:
    """Return the attention weights that a mechanism of the block reads; None if none does."""
    reading = (options for options in config.built(site) if type(options) in REQUESTS)
    return next((REQUESTS[type(options)](options) for options in reading), None)


def _linear(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    out = x @ parameters[f"{name}.weight"].T
    return out + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else out
