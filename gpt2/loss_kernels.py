"""Triton kernel of the cross-entropy of a row of logits; requires triton.

X tokens, V vocabulary.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Elements of a row that a program reads at once.
_BLOCK = 4096
_WARPS = 8


@triton.jit
def _softmax_gradient(logits, targets, losses, stride, V, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the loss of a row, and replace the row by p − onehot."""
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    target = tl.load(targets + row)
    columns_C = tl.arange(0, C)
    top_C = tl.full([C], -float("inf"), tl.float32)
    sum_C = tl.zeros([C], tl.float32)
    chosen_C = tl.zeros([C], tl.float32)
    for start in range(0, V, C):
        here_C = start + columns_C
        x_C = tl.load(at + here_C, mask=here_C < V, other=-float("inf")).to(tl.float32)
        # A column of which nothing was read yet has no largest logit: −∞ − −∞ is no number.
        higher_C = tl.maximum(top_C, x_C)
        shift_C = tl.where(higher_C == -float("inf"), 0.0, higher_C)
        sum_C = sum_C * tl.exp(top_C - shift_C) + tl.exp(x_C - shift_C)
        top_C = higher_C
        # From this pass: another thread may have replaced the logit in the second one.
        chosen_C += tl.where(here_C == target, x_C, 0.0)
    top = tl.max(top_C, 0)
    total = tl.sum(sum_C * tl.exp(top_C - top), 0)
    tl.store(losses + row, tl.log(total) + (top - tl.sum(chosen_C, 0)))
    for start in range(0, V, C):
        here_C = start + columns_C
        seen_C = here_C < V
        x_C = tl.load(at + here_C, mask=seen_C, other=-float("inf")).to(tl.float32)
        p_C = tl.exp(x_C - top) / total - tl.where(here_C == target, 1.0, 0.0)
        tl.store(at + here_C, p_C.to(logits.dtype.element_ty), mask=seen_C)


KERNEL = _softmax_gradient


def softmax_gradient_(logits_XV: Tensor, targets_X: Tensor, losses_X: Tensor) -> None:
    """Fill ``losses_X`` and replace logits by the gradient of the summed loss, p − onehot.

    Elements of a row must be adjacent. Targets are valid; the losses are float32.
    """
    rows, vocab = logits_XV.shape
    arguments: tuple[Any, ...] = (logits_XV, targets_X, losses_X, logits_XV.stride(0), vocab)
    _softmax_gradient[(rows,)](*arguments, **launch_constants(vocab))


def launch_constants(vocab: int) -> dict[str, int]:
    """Return the columns of a block and the warps of a program."""
    return {"C": min(_BLOCK, triton.next_power_of_2(vocab)), "num_warps": _WARPS}
