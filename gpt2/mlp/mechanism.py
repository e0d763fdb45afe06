"""Interface of the mechanisms of an MLP. Shapes: B batch, T tokens, M hidden units."""

from torch import Tensor, nn

from gpt2.attention.state import AttentionOutputs, AttentionWeightsOptions, BlockState
from gpt2.kv_cache import BlockKVCache


class MlpMechanism(nn.Module):
    """Module between activation and ``c_proj``; constructed as (options, hidden, width, site)."""

    # Attention weights of the block that the mechanism requires; None if it reads none.
    request: AttentionWeightsOptions | None = None

    def forward(self, h_BTM: Tensor, view: AttentionOutputs, state: BlockState) -> Tensor:
        """Return the new hidden layer; outputs for the next block are written to ``state``."""
        raise NotImplementedError

    def decode(
        self, h_BTM: Tensor, view: AttentionOutputs, state: BlockState, cache: BlockKVCache
    ) -> Tensor:
        """Return the new hidden layer for tokens that follow the cached ones.

        The default fits mechanisms without dependencies between tokens.
        """
        return self(h_BTM, view, state)
