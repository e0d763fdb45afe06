"""MLP of one block, and its formula: GPT-2's two projections with mechanisms on the hidden layer.

Shapes: B batch, T tokens, C n_embd, M hidden units.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from gpt2.attention.options import AttentionWeightsOptions
from gpt2.attention.projections import AdaptableLinear
from gpt2.attention.state import AttentionOutputs, BlockState
from gpt2.kv_cache import BlockKVCache
from gpt2.mlp import activations, cross_token, gate, latent
from gpt2.mlp.options import (
    LayerSpec,
    MlpAttnGateOptions,
    MlpConfig,
    MlpCrossTokenOptions,
    MlpLatentOptions,
)

# Modules between activation and ``c_proj``, called with the options, the hidden width, the mechanism's
# width and the site. Their forward takes the hidden layer, the view of attention, the state for the
# next block and, if the tokens follow cached ones, the cache of the block; it returns the new hidden
# layer and writes outputs for the next block to the state.
MODULES: dict[type[Any], Callable[[Any, int, int, LayerSpec], nn.Module]] = {
    MlpCrossTokenOptions: cross_token.MlpCrossToken,
    MlpLatentOptions: latent.MlpLatent,
    MlpAttnGateOptions: gate.MlpAttnGate,
}


class Mlp(nn.Module):
    """MLP: ``c_fc``, activation, mechanisms in registry order, ``c_proj``, dropout."""

    def __init__(self, site: LayerSpec, config: MlpConfig) -> None:
        super().__init__()
        shape, size = site.shape, config.size(site)
        # A gated activation reads two matrices.
        rows = [size.hidden] * config.activation.fc_outputs
        self.c_fc = AdaptableLinear(shape.n_embd, rows, shape.bias)
        self.activation = activations.FUNCTIONS[type(config.activation)]
        self.mechanisms = nn.ModuleDict(
            {
                options.name: MODULES[type(options)](
                    options, size.hidden, size.widths[options.name], site
                )
                for options in config.built(site)
            }
        )
        self.c_proj = AdaptableLinear(size.hidden, [shape.n_embd], shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self, x_BTC: Tensor, view: AttentionOutputs, cache: BlockKVCache | None = None
    ) -> tuple[Tensor, BlockState]:
        """Return the output and the state for the next block; with a cache, of new tokens."""
        state = BlockState()
        h_BTM = self.activation(self.c_fc(x_BTC))
        for mechanism in self.mechanisms.values():
            h_BTM = mechanism(h_BTM, view, state, cache)
        return self.dropout(self.c_proj(h_BTM)), state


# The formulas share no code with the modules and are differentiable in any float dtype. They are
# called with the hidden layer, the view of attention, the state for the next block, the mechanism's
# parameters by name, its options and the site. They return the new hidden layer, and write what the
# next block reads to the state. In the order in which mechanisms transform the hidden layer
# (docs/mechanisms/mlp.md).
REFERENCES: dict[type[Any], Callable[..., Tensor]] = {
    MlpCrossTokenOptions: cross_token.reference_mix,
    MlpLatentOptions: latent.reference_coupling,
    MlpAttnGateOptions: gate.reference_gate,
}


def reference_mlp(
    x_BTC: Tensor,
    view: AttentionOutputs,
    parameters: Mapping[str, Tensor],
    site: LayerSpec,
    config: MlpConfig,
) -> tuple[Tensor, BlockState]:
    """Return the output without dropout and the next block's state, by named parameters."""
    state = BlockState()
    h_BTM = activations.REFERENCES[type(config.activation)](_linear(x_BTC, parameters, "c_fc"))
    for options in sorted(config.built(site), key=lambda built: [*REFERENCES].index(type(built))):
        prefix = f"mechanisms.{options.name}."
        weights = {
            name.removeprefix(prefix): value
            for name, value in parameters.items()
            if name.startswith(prefix)
        }
        h_BTM = REFERENCES[type(options)](h_BTM, view, state, weights, options, site)
    return _linear(h_BTM, parameters, "c_proj"), state


def reference_request(site: LayerSpec, config: MlpConfig) -> AttentionWeightsOptions | None:
    for m in config.built(site):
        if isinstance(m, MlpCrossTokenOptions):
            return AttentionWeightsOptions(m.sparsity, m.topk, m.tau, m.detach_weights)
    return None


def _linear(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    out = x @ parameters[f"{name}.weight"].T
    return out + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else out
