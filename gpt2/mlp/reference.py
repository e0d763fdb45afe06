"""Reference MLP, built from the references of its mechanisms.

B batch, T tokens, C n_embd, M hidden units. It shares no code with the trained model and is
differentiable in any float dtype. The options of a mechanism compute the mechanism's formula.
"""

from collections.abc import Mapping

from torch import Tensor

from gpt2.attention.state import AttentionOutputs, AttentionWeightsOptions, BlockState
from gpt2.mlp.config import MlpConfig
from gpt2.mlp.options import LayerSpec

# The order in which mechanisms transform the hidden layer (docs/mechanisms/mlp.md).
_ORDER = ("mlp_cross_token", "mlp_latent", "mlp_attn_gate")


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
    h_BTM = config.activation.reference(_linear(x_BTC, parameters, "c_fc"))
    for options in sorted(config.built(site), key=lambda options: _ORDER.index(options.name)):
        prefix = f"mechanisms.{options.name}."
        weights = {
            name.removeprefix(prefix): value
            for name, value in parameters.items()
            if name.startswith(prefix)
        }
        h_BTM = options.reference_apply(h_BTM, view, state, weights, site)
    return _linear(h_BTM, parameters, "c_proj"), state


def requested_weights(site: LayerSpec, config: MlpConfig) -> AttentionWeightsOptions | None:
    """Return the attention weights that a mechanism of the block reads; None if none does."""
    requests = (options.reference_request() for options in config.built(site))
    return next((request for request in requests if request), None)


def _linear(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    out = x @ parameters[f"{name}.weight"].T
    return out + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else out
