"""Faults that only the full size shows, and faults of decoding.

B batch, T tokens, C n_embd.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.attention.attention import Attention
from gpt2.attention.components import Window
from gpt2.check import generation_checks
from gpt2.kv_cache import BlockKVCache
from gpt2.mlp.cross_token import MlpCrossToken
from gpt2.mlp.gate import MlpAttnGate
from gpt2.model import GPT
from tests.mutants.mutant import MECHANISMS, Mutant, after_init, edited, replaced, then

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


def _as_if_whole(right: Any) -> Any:
    return lambda self, h_BTM, cache: right(self, h_BTM, None)


def _keeps_the_first_tokens(right: Any) -> Any:
    def first(model: GPT, prompt: torch.Tensor, *rest: Any) -> Iterator[int]:
        return right(model, prompt[: len(prompt) // 2], *rest)

    return first


def _ends_in_evaluation(right: Any) -> Any:
    def generated(model: GPT, *rest: Any) -> Iterator[int]:
        yield from right(model, *rest)

    def ended(model: GPT, *rest: Any) -> Iterator[int]:
        for token in generated(model, *rest):
            model.eval()
            yield token

    return ended


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
        "decoding pools the gate over new tokens alone",
        "gate-pooled",
        {"decode": _DECODED},
        replaced(MlpAttnGate, "_gate", _as_if_whole),
        MECHANISMS,
    ),
    Mutant(
        "generated text has dropout",
        "baseline",
        {"decode": "generation-mode"},
        edited(generation_checks, "generate", "model.eval()", "model.train()"),
    ),
    Mutant(
        "the context is not shortened",
        "baseline",
        {"decode": "generated-logits"},
        replaced(generation_checks, "generate", _keeps_the_first_tokens),
    ),
    Mutant(
        "generation leaves the model in evaluation mode",
        "baseline",
        {"decode": "generation-side-effect"},
        replaced(generation_checks, "generate", _ends_in_evaluation),
    ),
)
