"""Reference rotary positions with complex numbers. B batch, N heads, T tokens, H head dim."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt2.positions.rope.options import RopeOptions


def rotated(x_BNTH: Tensor, tokens: Sequence[int], options: RopeOptions) -> Tensor:
    """Return ``x`` with (x_j, x_{j+H/2}) as a complex number times e^{i t θ_j} at token t."""
    half = x_BNTH.shape[-1] // 2
    angles = [[t / options.base ** (j / half) for j in range(half)] for t in tokens]
    angles_Tj = torch.tensor(angles, dtype=torch.float64).view(len(tokens), half)
    turns_Tj = torch.polar(torch.ones_like(angles_Tj), angles_Tj)
    plane_BNTj = torch.complex(x_BNTH[..., :half], x_BNTH[..., half:]) * turns_Tj
    return torch.cat((plane_BNTj.real, plane_BNTj.imag), -1).to(x_BNTH.dtype)
