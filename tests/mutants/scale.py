"""Faults that only the full size shows, and faults of decoding.

B batch, T tokens, C n_embd.
"""

from typing import Any

import torch
from torch import Tensor, nn

from gpt2.attention.attention import Attention
from gpt2.attention.components import Window
from gpt2.attention.projections import Latent
from gpt2.kv_cache import BlockKVCache, KVCache
from gpt2.mlp.cross_token import MlpCrossToken
from gpt2.mlp.gate import MlpAttnGate
from tests.mutants.mutant import MECHANISMS, Mutant, after_init, replaced, then

_DECODED = "cached-logits"
# Wider than every small form.
_WIDE = 1024


def _wrong_where_wide(self: Any) -> None:
    if self.up.out_features > _WIDE:
        self.up = nn.Linear(self.up.in_features + 1, self.up.out_features, bias=False)


def _keeping_scores(out: Any, self: Attention, x_BTC: Tensor, *rest: Any) -> Any:
    """Save a tensor of 1000 times the residual stream for the backward pass."""
    kept = torch.exp(x_BTC[..., None].expand(*x_BTC.shape, 1000))
    return out[0] + 1e-9 * kept.square().sum(-1), out[1]


def _turned(right: Any) -> Any:
    def extend(self: BlockKVCache, name: str, new: Tensor, dim: int, **reach: Any) -> Tensor:
        whole = right(self, name, new, dim, **reach)
        return whole.flip(dim) if name == "q" and self.position > 20 else whole

    return extend


def _not_advanced(self: KVCache, tokens: int) -> None:
    """Advance the blocks only, so that positions start at 0 in every call."""
    for block in self.blocks:
        block.position += tokens


def _as_if_whole(right: Any) -> Any:
    return lambda self, h_BTM, cache: right(self, h_BTM, None)


MUTANTS = (
    Mutant(
        "a width is wrong at the configured size",
        "golden-gate-cross",
        {"full_size": ("training-step", r"mlp_cross_token\.up")},
        after_init(MlpCrossToken, _wrong_where_wide),
    ),
    Mutant(
        "a step saves too much",
        "baseline",
        {"full_size": "fits-memory"},
        then(Attention, "forward", _keeping_scores),
        quick=True,
    ),
    Mutant(
        "decoding reverses the cached queries",
        "ra",
        {"decode": _DECODED},
        replaced(BlockKVCache, "extend", _turned),
        quick=True,
    ),
    Mutant(
        "decoding forgets the oldest visible token",
        "sliding",
        {"decode": _DECODED},
        replaced(Window, "left", lambda _: lambda self, row: max(0, row - self.width + 2)),
        MECHANISMS,
    ),
    Mutant(
        "decoding expands values by the keys' matrix",
        "mla",
        {"decode": _DECODED},
        replaced(
            Latent,
            "expand",
            lambda _: lambda self, context: context @ self._per_head(self.expand_k).mT,
        ),
    ),
    Mutant(
        "decoding starts at position 0 in every call",
        "full",
        {"decode": _DECODED},
        replaced(KVCache, "advance", lambda _: _not_advanced),
    ),
    Mutant(
        "decoding pools the gate over new tokens alone",
        "gate-pooled",
        {"decode": _DECODED},
        replaced(MlpAttnGate, "_gate", _as_if_whole),
        MECHANISMS,
    ),
)
