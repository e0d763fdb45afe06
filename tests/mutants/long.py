"""Faults beyond the context of the small forms.

B batch, T tokens, C n_embd; r the rows of a chunk, c its columns.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpt2.attention import cross_token, exposed
from gpt2.attention.components import RowChunk, Window
from gpt2.attention.exposed import AttentionWeightsTap
from gpt2.attention.positions import Rope
from gpt2.attention.reciprocal import Reciprocal
from gpt2.attention.rows import ScoreChunks
from gpt2.model import GPT
from gpt2.nsa import branches, query_major, select
from tests.mutants.mutant import (
    MECHANISMS,
    Expected,
    Mutant,
    Plant,
    edited,
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


def _wider_if_long(right: Any) -> Any:
    def arguments(self: Window, length: int, device: torch.device) -> dict[str, Any]:
        wide = Window((self.width or length) + 1)
        mask: dict[str, Any] = right(wide if length > 512 else self, length, device)
        return mask

    return arguments


def _without_last_row(out: Iterator[RowChunk], *given: Any) -> Iterator[RowChunk]:
    for chunk in out:
        if chunk.first < 500 or chunk.height == 1:
            yield chunk
        else:
            yield dataclasses.replace(chunk, last=chunk.last - 1)
            # The row sees the columns of the row before.
            yield RowChunk(chunk.last - 1, chunk.last, chunk.left + 1)


def _ends(right: Any) -> Any:
    def scores(self: Reciprocal, rows: Any, band: Any, chunk: Any, inputs: Any) -> Tensor:
        added_BNrb: Tensor = right(self, rows, band, chunk, inputs)
        return added_BNrb * (chunk.positions(added_BNrb) <= 1000)

    return scores


def _unranked(right: Any) -> Any:
    def blocks(scores_BKTJ: Tensor, options: Any, first: int) -> Tensor:
        tokens_T1 = torch.arange(first, first + scores_BKTJ.shape[2])[:, None]
        out: Tensor = right(scores_BKTJ * (tokens_T1 < 512), options, first)
        return out

    return blocks


def _near_alone(out: Tensor, *given: Any) -> Tensor:
    out[..., 512:] = 0.0
    return out


def _whole_pieces(right: Any) -> Any:
    def values(weights: Tensor, k: int) -> Tensor:
        size = exposed.SORT_WIDTH
        whole = weights.shape[-1] // size * size
        out: Tensor = right(weights[..., : whole or None], k)
        return out

    return values


def _shorter_if_long(right: Any) -> Any:
    return lambda q, k, v, window: right(q, k, v, window - (k.shape[2] > 512))


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
    _long(
        "rotary angles in bf16",
        "rope",
        then(Rope, "_angles", lambda out, *given: out.bfloat16().double()),
        defconfig=MECHANISMS,
    ),
    _long(
        "rotary angles in fp32",
        "rope",
        then(Rope, "_angles", lambda out, *given: out.float().double()),
        defconfig=MECHANISMS,
    ),
    _long(
        "sliding window is wider in long sequences",
        "sliding",
        replaced(Window, "sdpa_arguments", _wider_if_long),
        defconfig=MECHANISMS,
    ),
    _long("a chunk starts too late", "full", then(ScoreChunks, "chunks", _without_last_row)),
    _long("reciprocal term ends at 1,000 tokens", "ra", replaced(Reciprocal, "scores", _ends)),
    _long(
        "selection stops ranking at 512 tokens",
        "nsa",
        replaced(select, "select_blocks", _unranked),
        defconfig=_NSA,
    ),
    _long(
        "window of sparse attention is shorter in long sequences",
        "nsa",
        replaced(branches, "attend_window", _shorter_if_long),
        defconfig=_NSA,
    ),
    _long(
        "the last columns of long rows are not ranked",
        "golden-gate-cross",
        replaced(exposed, "topk_values", _whole_pieces),
        ("long-context", "^attention weights"),
    ),
    _long(
        "the MLP reads 512 columns",
        "golden-gate-cross",
        then(AttentionWeightsTap, "read", _near_alone),
        ("long-context", "^attention weights"),
    ),
    _long(
        "a chunk replaces the gradient of keys",
        "nsa",
        edited(
            query_major,
            "backward",
            "dk_MH[columns].addmm_(dscores_Rc.T, q_Rx[:, :-1])",
            "dk_MH[columns] = dscores_Rc.T @ q_Rx[:, :-1]",
        ),
        _GRADIENT,
        defconfig=_NSA,
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
