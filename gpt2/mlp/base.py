"""The MLP of one block: GPT-2's two projections, and mechanisms on the hidden layer between them.

Shapes: B batch, T tokens, C n_embd, M hidden units.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.attention.state import AttentionView, BlockState, WeightsRequest
from gpt2.cache import BlockCache
from gpt2.mlp import MECHANISMS
from gpt2.mlp.options import BlockSite, MlpConfig

ACTIVATIONS = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_exact": F.gelu,
}


class MlpMechanism(nn.Module):
    """What stands between the activation and ``c_proj``; built as (options, hidden, width, site)."""

    # What the mechanism wants to see of its block's attention weights.
    request: WeightsRequest | None = None

    def forward(self, h_BTM: Tensor, view: AttentionView, state: BlockState) -> Tensor:
        """The new hidden layer; what the next block is to get is written to ``state``."""
        raise NotImplementedError

    def decode(
        self, h_BTM: Tensor, view: AttentionView, state: BlockState, cache: BlockCache
    ) -> Tensor:
        """The same for tokens after those that ``cache`` was given before.

        As it stands, for a mechanism whose tokens do not depend on each other.
        """
        h_BTM = self(h_BTM, view, state)
        return h_BTM


class Mlp(nn.Module):
    """``c_fc``, activation, the block's mechanisms in registry order, ``c_proj``, dropout."""

    def __init__(self, site: BlockSite, config: MlpConfig) -> None:
        super().__init__()
        shape, size = site.shape, config.size(site)
        self.c_fc = nn.Linear(shape.n_embd, size.hidden, bias=shape.bias)
        self.activation = ACTIVATIONS[shape.activation]
        self.mechanisms = nn.ModuleDict(
            {
                options.name: MECHANISMS.module(options.name)(
                    options, size.hidden, size.widths[options.name], site
                )
                for options in config.built(site)
            }
        )
        self.c_proj = nn.Linear(size.hidden, shape.n_embd, bias=shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    @property
    def request(self) -> WeightsRequest | None:
        """The attention weights that the block's attention must show to this MLP."""
        wanted = [m.request for m in self.mechanisms.values() if m.request is not None]
        assert len(wanted) <= 1, "one view of the attention weights serves one mechanism"
        return wanted[0] if wanted else None

    def forward(
        self, x_BTC: Tensor, view: AttentionView, cache: BlockCache | None = None
    ) -> tuple[Tensor, BlockState]:
        """The MLP's output, and what the next block is to get.

        With a cache, ``x`` are the tokens after those that it was given before.
        """
        state = BlockState()
        h_BTM = self.activation(self.c_fc(x_BTC))
        for mechanism in self.mechanisms.values():
            if cache is None:
                h_BTM = mechanism(h_BTM, view, state)
            else:
                h_BTM = mechanism.decode(h_BTM, view, state, cache)
        return self.dropout(self.c_proj(h_BTM)), state
