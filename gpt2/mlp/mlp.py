"""MLP of one block: GPT-2's two projections with mechanisms on the hidden layer between them.

Shapes: B batch, T tokens, C n_embd, M hidden units.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention.state import AttentionOutputs, AttentionWeightsOptions, BlockState
from gpt2.kv_cache import BlockKVCache
from gpt2.mlp.activations import GeluExactOptions, GeluTanhOptions
from gpt2.mlp.config import MlpConfig
from gpt2.mlp.mechanism import MlpMechanism
from gpt2.mlp.mlp_attn_gate.module import MlpAttnGate
from gpt2.mlp.mlp_attn_gate.options import MlpAttnGateOptions
from gpt2.mlp.mlp_cross_token.module import MlpCrossToken
from gpt2.mlp.mlp_cross_token.options import MlpCrossTokenOptions
from gpt2.mlp.mlp_latent.module import MlpLatent
from gpt2.mlp.mlp_latent.options import MlpLatentOptions
from gpt2.mlp.options import LayerSpec

# Called with the options, the hidden width, the mechanism's width and the site.
MODULES: dict[type[Any], Callable[[Any, int, int, LayerSpec], MlpMechanism]] = {
    MlpCrossTokenOptions: MlpCrossToken,
    MlpLatentOptions: MlpLatent,
    MlpAttnGateOptions: MlpAttnGate,
}
FUNCTIONS: dict[type[Any], Callable[[Tensor], Tensor]] = {
    GeluTanhOptions: partial(F.gelu, approximate="tanh"),
    GeluExactOptions: F.gelu,
}


class Mlp(nn.Module):
    """MLP: ``c_fc``, activation, mechanisms in registry order, ``c_proj``, dropout."""

    def __init__(self, site: LayerSpec, config: MlpConfig) -> None:
        super().__init__()
        shape, size = site.shape, config.size(site)
        self.c_fc = nn.Linear(
            shape.n_embd, config.activation.fc_outputs * size.hidden, bias=shape.bias
        )
        self.activation = FUNCTIONS[type(config.activation)]
        self.mechanisms = nn.ModuleDict(
            {
                options.name: MODULES[type(options)](
                    options, size.hidden, size.widths[options.name], site
                )
                for options in config.built(site)
            }
        )
        self.c_proj = nn.Linear(size.hidden, shape.n_embd, bias=shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    @property
    def request(self) -> AttentionWeightsOptions | None:
        """Return the attention weights that the block's attention must expose to this MLP."""
        requests = [m.request for m in self._built() if m.request is not None]
        assert len(requests) <= 1, "only one mechanism per block can read attention weights"
        return requests[0] if requests else None

    def forward(
        self, x_BTC: Tensor, view: AttentionOutputs, cache: BlockKVCache | None = None
    ) -> tuple[Tensor, BlockState]:
        """Return the output of the MLP and the state for the next block.

        With a cache, ``x`` contains only the tokens that follow the cached ones.
        """
        state = BlockState()
        h_BTM = self.activation(self.c_fc(x_BTC))
        for mechanism in self._built():
            if cache is None:
                h_BTM = mechanism(h_BTM, view, state)
            else:
                h_BTM = mechanism.decode(h_BTM, view, state, cache)
        return self.dropout(self.c_proj(h_BTM)), state

    def _built(self) -> list[MlpMechanism]:
        return cast(list[MlpMechanism], list(self.mechanisms.values()))
