"""Largest values of each row, by a Triton kernel; importing the module requires triton.

M rows of a program, W the padded width of a row, L the padded number of largest values.
"""

import torch
import triton
import triton.language as tl

# Rows of a program of ``_largest``, and the longest row that its registers hold.
_LARGEST_ROWS, LARGEST_WIDTH = 4, 4096


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    weights, largest, rows, width, k,
    M: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    rows_M = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    at_W, at_L = tl.arange(0, W), tl.arange(0, L)
    mask_MW = (rows_M[:, None] < rows) & (at_W[None, :] < width)
    weights_MW = tl.load(
        weights + rows_M[:, None] * width + at_W[None, :], mask=mask_MW, other=-1.0
    )
    mask_ML = (rows_M[:, None] < rows) & (at_L[None, :] < k)
    tl.store(largest + rows_M[:, None] * k + at_L[None, :], tl.topk(weights_MW, L), mask=mask_ML)


def largest_values(weights: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k largest elements of the last dimension, of at most ``LARGEST_WIDTH``, all ≥ 0.

    torch.topk takes ten times as long for rows of 1,024.
    """
    width = weights.shape[-1]
    rows = weights.numel() // width
    largest = weights.new_empty(*weights.shape[:-1], k)
    sides = {"W": triton.next_power_of_2(width), "L": triton.next_power_of_2(k)}
    grid = (triton.cdiv(rows, _LARGEST_ROWS),)
    _largest[grid](weights.contiguous(), largest, rows, width, k, M=_LARGEST_ROWS, **sides)
    return largest
