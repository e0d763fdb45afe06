"""Latent projection, after multi-head latent attention (arXiv 2405.04434).

B batch, T tokens, C n_embd, N heads, H head dim, R latent dim.
"""

from torch import Tensor, nn

from gpt2.attention.heads import Heads, Projection, split_heads
from gpt2.attention.latent.options import LatentOptions
from gpt2.attention.state import BlockState
from gpt2.shape import Shape


class Latent(Projection):
    """Latent projection: c_k and c_v of width R, expanded to keys and values.

    ``expand_k`` and ``expand_v`` stack the matrices K_h and U_h of all heads, or have a single one
    if the expansion is shared.
    """

    def __init__(self, shape: Shape, options: LatentOptions) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width, n_embd = options.width(shape), shape.n_embd
        expanded = shape.head_dim if options.shared_expansion else n_embd
        self.c_q = nn.Linear(n_embd, n_embd, bias=False)
        self.c_k = nn.Linear(n_embd, width, bias=False)
        self.c_v = nn.Linear(n_embd, width, bias=False)
        self.expand_k = nn.Linear(width, expanded, bias=False)
        self.expand_v = nn.Linear(width, expanded, bias=False)

    def forward(self, x_BTC: Tensor, state: BlockState) -> Heads:
        """Return queries, keys and values; ``latent_BTR`` is c_k including the shift."""
        latent_BTR = self._latent_keys(x_BTC, state)
        wide = self.c_q(x_BTC), self.expand_k(latent_BTR), self.expand_v(self.c_v(x_BTC))
        return Heads(*(split_heads(part, self.head_dim) for part in wide), latent_BTR)

    def decode(self, x_BTC: Tensor, state: BlockState) -> Heads:
        """Return queries and keys in absorbed form: q_h K_hᵀ, with c_k and c_v shared by all heads.

        (q_h K_hᵀ) · c_k = q_h · k_h, so keys are not expanded: queries and keys both have width R.
        """
        latent_BTR = self._latent_keys(x_BTC, state)
        q_BNTH = split_heads(self.c_q(x_BTC), self.head_dim)
        q_BNTR = q_BNTH @ self._per_head(self.expand_k)
        # A shift may be wider than the autocast dtype of products; in forward expand_k casts it.
        cached_BTR = latent_BTR.to(q_BNTR.dtype)
        return Heads(q_BNTR, cached_BTR[:, None], self.c_v(x_BTC)[:, None], latent_BTR)

    def expand(self, context_BNTR: Tensor) -> Tensor:
        """Return (Σ p c_v) U_h = Σ p v_h."""
        return context_BNTR @ self._per_head(self.expand_v).mT

    def _latent_keys(self, x_BTC: Tensor, state: BlockState) -> Tensor:
        latent_BTR = self.c_k(x_BTC)
        if state.latent_shift_BTR is None:
            return latent_BTR
        return latent_BTR + state.latent_shift_BTR

    def _per_head(self, expansion: nn.Linear) -> Tensor:
        """Return the expansion as NHR, or 1HR if all heads share it."""
        return expansion.weight.unflatten(0, (-1, self.head_dim))
