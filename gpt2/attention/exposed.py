"""Attention weights that the MLP reads, and sums of the largest weights of a row.

B batch, N heads; r the rows of a chunk, c its columns.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gpt2.attention.components import RowChunk, Window
from gpt2.attention.options import AttentionWeightsOptions
from gpt2.attention.triton import triton_largest

# numpy sorts short rows with SIMD instructions, about eight times faster on a CPU than torch.topk.
# Maximum row length for the SIMD sort; longer rows are reduced piece by piece.
SORT_WIDTH = 256


@library.custom_op("kablate::largest", mutates_args=(), device_types="cpu")
def topk_values(weights: Tensor, k: int) -> Tensor:
    """Return the k largest elements ≥ 0 of the last dimension, unordered; all if fewer."""
    while weights.shape[-1] > SORT_WIDTH and 2 * k <= SORT_WIDTH:
        padded = F.pad(weights, (0, -weights.shape[-1] % SORT_WIDTH))
        weights = _largest_sorted(padded.unflatten(-1, (-1, SORT_WIDTH)), k).flatten(-2)
    return _largest_sorted(weights, k)


def _largest_sorted(weights: Tensor, k: int) -> Tensor:
    ordered = np.sort(weights.numpy(), axis=-1)
    return torch.from_numpy(ordered[..., -k:].copy())


@topk_values.register_kernel("cuda")
def _(weights: Tensor, k: int) -> Tensor:
    k = min(k, weights.shape[-1])
    found = triton_largest(weights, k)
    return weights.topk(k, sorted=False).values if found is None else found


@topk_values.register_fake
def _(weights: Tensor, k: int) -> Tensor:
    return weights.new_empty(*weights.shape[:-1], min(k, weights.shape[-1]))


class _LargestSum(Function):
    """Sum of the k largest elements; ties with the k-th share its derivative."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, k: int, total: Tensor, edge: Tensor) -> Tensor:
        ctx.save_for_backward(weights, edge[..., None])
        ctx.k = k
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum: Tensor) -> tuple[Tensor, None, None, None]:
        weights, edge = ctx.saved_tensors
        # Float comparison results are several times faster on a CPU than bool results.
        above = torch.gt(weights, edge, out=torch.empty_like(weights))
        level = torch.eq(weights, edge, out=torch.empty_like(weights))
        places = min(ctx.k, weights.shape[-1]) - above.sum(-1, keepdim=True)
        share = places / level.sum(-1, keepdim=True).clamp_min(1)
        return above.addcmul_(level, share).mul_(dsum[..., None]), None, None, None


def sum_and_edge(weights: Tensor, k: int) -> Tensor:
    """Return the sum of the k largest elements ≥ 0 of the last dimension, and the k-th: [2, …]."""
    largest = topk_values(weights, k)
    return torch.stack((largest.sum(-1), largest.amin(-1)))


def largest_sum(weights: Tensor, k: int, known: Tensor) -> Tensor:
    """Return the sum that is in ``known``, the result of ``sum_and_edge``, differentiable."""
    total: Tensor = _LargestSum.apply(weights, k, *known)
    return total


class AttentionWeightsTap:
    """Reader of the last softmax of a chunk. The selection of weights is not differentiated."""

    def __init__(self, request: AttentionWeightsOptions, pattern: Window) -> None:
        self.request = request
        self.pattern = pattern

    def read(self, weights_BNrc: Tensor, chunk: RowChunk) -> Tensor:
        """Return the weights that the MLP reads, Brc; a row sums to 1, or to 0 if it is empty."""
        weights, total = self._kept(weights_BNrc, chunk)
        return weights.div_(total)

    def backward(self, drows_Brc: Tensor, weights_BNrc: Tensor, chunk: RowChunk) -> Tensor:
        """Return the gradient of the weights, B1rc: identical for every head."""
        weights, total = self._kept(weights_BNrc, chunk)
        drows = drows_Brc.to(weights.dtype)
        # Of w / Σ w over the selected weights.
        mean = torch.linalg.vecdot(drows, weights)[..., None] / total
        dmean = (drows - mean).mul_(weights > 0).div_(total)
        return dmean.div_(weights_BNrc.shape[1])[:, None]

    def _kept(self, weights_BNrc: Tensor, chunk: RowChunk) -> tuple[Tensor, Tensor]:
        """Return the selected mean weights and their clamped sum per row."""
        mean_Brc = weights_BNrc.mean(1)
        if self.request.sparsity == "topk":
            mean_Brc.mul_(
                mean_Brc >= topk_values(mean_Brc, self.request.topk).amin(-1, keepdim=True)
            )
        elif self.request.sparsity == "rms":
            visible = self.pattern.visible(chunk, mean_Brc)
            rms = torch.linalg.vector_norm(mean_Brc, dim=-1, keepdim=True)
            rms.mul_(visible.rsqrt())
            mean_Brc.mul_(mean_Brc >= self.request.tau * rms)
        total = mean_Brc.sum(-1, keepdim=True)
        return mean_Brc, total.clamp_min(torch.finfo(total.dtype).tiny)
