"""Top-k weights of every row.

numpy sorts short rows with SIMD instructions, about eight times faster on a CPU than torch.topk
(0.4 ms instead of 3.6 ms for 1536 rows of 256); the values are identical.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, library

# Maximum row length for the SIMD sort; longer rows are reduced piece by piece.
PIECE = 256


@library.custom_op("kablate::largest", mutates_args=(), device_types="cpu")
def largest(weights: Tensor, k: int) -> Tensor:
    """Return the k largest elements of the last dimension, unordered (all if there are fewer).

    ``weights`` must be ≥ 0. Not differentiable.
    """
    while weights.shape[-1] > PIECE and 2 * k <= PIECE:
        padded = F.pad(weights, (0, -weights.shape[-1] % PIECE))
        weights = _largest_sorted(padded.unflatten(-1, (-1, PIECE)), k).flatten(-2)
    return _largest_sorted(weights, k)


def _largest_sorted(weights: Tensor, k: int) -> Tensor:
    ordered = np.sort(weights.numpy(), axis=-1)
    return torch.from_numpy(ordered[..., -k:].copy())


@largest.register_kernel("cuda")
def _(weights: Tensor, k: int) -> Tensor:
    return weights.topk(min(k, weights.shape[-1]), sorted=False).values


@largest.register_fake
def _(weights: Tensor, k: int) -> Tensor:
    return weights.new_empty(*weights.shape[:-1], min(k, weights.shape[-1]))
