"""Faults beyond the context of the small forms.

B batch, T tokens, C n_embd; r the rows of a chunk, c its columns.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpt2.attention import cross_token
from gpt2.attention.components import RowChunk
from gpt2.attention.exposed import AttentionWeightsTap
from gpt2.attention.rows import ScoreChunks
from gpt2.model import GPT
from gpt2.nsa import select
from tests.mutants.mutant import (
    Expected,
    Mutant,
    Plant,
    replaced,
    then,
)

_NSA = "nsa-quickstart"
_ATTENTION: Expected = ("long-context", "^attention output")
_GRADIENT: Expected = ("long-gradient", "^the gradient of the input ")


def _long(
    name: str,
    step: str,
    plant: Plant,
    expected: Expected = _ATTENTION,
    **more: Any,
) -> Mutant:
    return Mutant(name, step, {"long": expected}, plant, **more)


def _wrapped(right: Any) -> Any:
    def hidden(self: GPT, idx_BT: Tensor, cache: Any = None) -> Tensor:
        table = self.wpe.weight
        turned = table[torch.arange(len(table)) % 256] - table
        hook = self.wte.register_forward_hook(
            lambda module, given, x_BTC: x_BTC + turned[: x_BTC.size(1)]
        )
        out: Tensor = right(self, idx_BT, cache)
        hook.remove()
        return out

    return hidden


def _without_last_row(out: Iterator[RowChunk], *given: Any) -> Iterator[RowChunk]:
    for chunk in out:
        if chunk.first < 500 or chunk.height == 1:
            yield chunk
        else:
            yield dataclasses.replace(chunk, last=chunk.last - 1)
            # The row sees the columns of the row before.
            yield RowChunk(chunk.last - 1, chunk.last, chunk.left + 1)


def _unranked(right: Any) -> Any:
    def blocks(scores_BKTJ: Tensor, options: Any, first: int) -> Tensor:
        tokens_T1 = torch.arange(first, first + scores_BKTJ.shape[2])[:, None]
        out: Tensor = right(scores_BKTJ * (tokens_T1 < 512), options, first)
        return out

    return blocks


def _near_alone(out: Tensor, *given: Any) -> Tensor:
    out[..., 512:] = 0.0
    return out


def _slope_of_a_chunk(out: Tensor, weights: Tensor, scores: Tensor, chunk: RowChunk) -> Tensor:
    positions_r = chunk.positions(out)[:, 0]
    ratio = positions_r.log() / (positions_r - chunk.first).clamp_min(2).log()
    return out.detach() + (out - out.detach()) * ratio


MUTANTS = (
    _long(
        "learned positions wrap",
        "baseline",
        replaced(GPT, "hidden", _wrapped),
        ("long-context", "^embeddings of token 256 of 1024"),
        quick=True,
    ),
    _long("a chunk starts too late", "full", then(ScoreChunks, "chunks", _without_last_row)),
    _long(
        "selection stops ranking at 512 tokens",
        "nsa",
        replaced(select, "select_blocks", _unranked),
        defconfig=_NSA,
    ),
    _long(
        "the MLP reads 512 columns",
        "golden-gate-cross",
        then(AttentionWeightsTap, "read", _near_alone),
        ("long-context", "^attention weights"),
    ),
    Mutant(
        "the slope of the entropy counts tokens from its chunk",
        "ract-entropy",
        {"long": _GRADIENT, "reference": ("reference-formulas", "^the gradient of ")},
        then(cross_token, "entropy", _slope_of_a_chunk),
        # A gradient with dropout is not compared if a value is detached.
        settings={"MLP_CROSS_TOKEN": True},
    ),
)
