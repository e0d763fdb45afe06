"""The latent projection, after multi-head latent attention (arXiv 2405.04434).

B batch, T tokens, C n_embd, N heads, H head dim, R latent dim.
"""

from torch import Tensor, nn

from gpt2.attention.heads import Heads, Projection, split_heads
from gpt2.attention.latent.options import LatentOptions
from gpt2.attention.state import BlockState
from gpt2.shape import Shape


class Latent(Projection):
    """c_k and c_v, R wide, expanded to the keys and values of every head, or of one for all.

    The columns of ``expand_k`` and ``expand_v`` are K_h and U_h, head after head.
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
        """Queries, keys and values; ``latent_BTR`` is c_k after the previous block's shift."""
        latent_BTR = self._latent_keys(x_BTC, state)
        wide = self.c_q(x_BTC), self.expand_k(latent_BTR), self.expand_v(self.c_v(x_BTC))
        return Heads(*(split_heads(part, self.head_dim) for part in wide), latent_BTR)

    def decode(self, x_BTC: Tensor, state: BlockState) -> Heads:
        """In absorbed form: q_h K_hᵀ, with c_k and c_v as the one key and value of all heads.

        (q_h K_hᵀ) · c_k = q_h · k_h, so no key is expanded, and R wide queries meet R wide keys.
        """
        latent_BTR = self._latent_keys(x_BTC, state)
        q_BNTH = split_heads(self.c_q(x_BTC), self.head_dim)
        q_BNTR = q_BNTH @ self._per_head(self.expand_k)
        # A shift may be wider than autocast's type, which products take: expand_k casts by itself.
        kept_BTR = latent_BTR.to(q_BNTR.dtype)
        return Heads(q_BNTR, kept_BTR[:, None], self.c_v(x_BTC)[:, None], latent_BTR)

    def expand(self, context_BNTR: Tensor) -> Tensor:
        """(Σ p c_v) U_h = Σ p v_h."""
        return context_BNTR @ self._per_head(self.expand_v).mT

    def _latent_keys(self, x_BTC: Tensor, state: BlockState) -> Tensor:
        latent_BTR = self.c_k(x_BTC)
        if state.latent_shift_BTR is None:
            return latent_BTR
        return latent_BTR + state.latent_shift_BTR

    def _per_head(self, expansion: nn.Linear) -> Tensor:
        """NHR, or 1HR where all heads share it."""
        return expansion.weight.unflatten(0, (-1, self.head_dim))
