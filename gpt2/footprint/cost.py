"""FLOPs of single operations, and temporary memory of kernels besides inputs and outputs.

Multiply and add count as two. B batch, N heads, T queries, S keys, H head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Registers kablate's operations with torch.
import gpt2.attention.nsa.ops
from gpt2.attention.nsa.options import selected_pairs, window_pairs

_aten = torch.ops.aten


def flops(func: Any, args: Any) -> float:
    """Return the FLOPs of a matrix product or an attention kernel; 0 for other operations."""
    count = _FLOPS.get(func)
    return count(args) if count else 0.0


def scratch_bytes(func: Any, args: Any) -> int:
    """Return the temporary bytes of a running kernel, which its fake implementation omits.

    The backward pass of flash and of memory-efficient attention accumulates dq in fp32 and stores Σ
    do·o of every query (Dao 2023, arXiv 2307.08691, algorithm 2).
    """
    if func not in (_FLASH_BACKWARD, _EFFICIENT_BACKWARD):
        return 0
    q_BNTH: Tensor = args[1]
    return 4 * (q_BNTH.numel() + q_BNTH.numel() // q_BNTH.shape[-1])


def _product(args: Any) -> float:
    """Return the FLOPs of [..., m, k] @ [..., k, n]."""
    left, right = args[-2:]
    return 2.0 * left.numel() * right.shape[-1]


def _attention(products: int, queries_at: int, causal_at: int) -> Callable[[Any], float]:
    """Count ``products`` of T × S × H; a causal kernel only computes the visible pairs.

    ``queries_at`` is the argument index of q, followed by k; ``causal_at`` that of the causal flag.
    """

    def count(args: Any) -> float:
        q_BNTH, k_BKSH = args[queries_at : queries_at + 2]
        batch, heads, queries, width = q_BNTH.shape
        keys = k_BKSH.shape[2]
        # torch omits trailing arguments that have their default value.
        causal = len(args) > causal_at and args[causal_at]
        pairs = queries * (queries + 1) / 2 if causal else queries * keys
        return 2.0 * products * batch * heads * pairs * width

    return count


def _selected(products: int, queries_at: int) -> Callable[[Any], float]:
    """Count ``products`` of T × S × H over the pairs of a block selection.

    ``queries_at`` is the argument index of q.
    """

    def count(args: Any) -> float:
        q_BKgTH, (blocks_BKTn, size) = args[queries_at], args[-2:]
        length = q_BKgTH.shape[3]
        pairs = selected_pairs(length, size, blocks_BKTn.shape[-1])
        return 2.0 * products * q_BKgTH.numel() / length * pairs

    return count


def _window(products: int, queries_at: int) -> Callable[[Any], float]:
    """Count ``products`` of T × S × H over the pairs of a window.

    ``queries_at`` is the argument index of q.
    """

    def count(args: Any) -> float:
        q_BKgTH, size = args[queries_at], args[-1]
        length = q_BKgTH.shape[3]
        return 2.0 * products * q_BKgTH.numel() / length * window_pairs(length, size)

    return count


_FLASH = _aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_CPU_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_EFFICIENT = _aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default
# Forward computes q kᵀ and p v; backward recomputes the scores, and computes dv, dp, dq and dk.
_FLOPS: dict[Any, Callable[[Any], float]] = {
    _aten.mm.default: _product,
    _aten.mm.out: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product,
    _aten.addmm_.default: _product,
    _aten.baddbmm.default: _product,
    _FLASH: _attention(2, 0, 4),
    _FLASH_BACKWARD: _attention(5, 1, 11),
    _CPU_FLASH: _attention(2, 0, 4),
    _CPU_FLASH_BACKWARD: _attention(5, 1, 7),
    _EFFICIENT: _attention(2, 0, 6),
    _EFFICIENT_BACKWARD: _attention(5, 1, 11),
    torch.ops.kablate.selected.default: _selected(2, 0),
    torch.ops.kablate.selected_backward.default: _selected(5, 1),
    torch.ops.kablate.window.default: _window(2, 0),
    torch.ops.kablate.window_backward.default: _window(5, 1),
}
