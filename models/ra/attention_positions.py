"""Position encodings applied to queries and keys.

B batch, N heads, T tokens, H head dim, j the H/2 pairs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention_options import RopeOptions
from .shape import ModelShape

# Cosines and sines, [T, H/2].
Rotation = tuple[Tensor, Tensor]


class PositionEncoding:
    """Position encoding of queries and keys; by default the identity, for learned positions."""

    rotates = False

    def __call__(self, x_BNTH: Tensor, first: int = 0, step: int = 1) -> Tensor:
        """Encode ``x``, with tokens at positions ``first``, ``first`` + ``step`` and so on."""
        return self.encode_all([x_BNTH], first, step)[0]

    def encode_all(
        self,
        heads: Sequence[Tensor],
        first: int = 0,
        step: int = 1,
        rotation: Rotation | None = None,
    ) -> Sequence[Tensor]:
        """Encode tensors BNTH of the same tokens; ``rotation`` is that of these, if known."""
        return list(heads)

    def rotation(self, x_BTC: Tensor, first: int) -> Rotation | None:
        """Return the rotation of the tokens of ``x``, which all blocks share; None without one."""
        return None


class Rope(PositionEncoding):
    """Rotary encoding (Su et al. 2021, arXiv 2104.09864) of pairs of elements j and j + H/2 of a
    head, as in GPT-NeoX and Llama; the paper's pairs 2j and 2j + 1 are equivalent up to the order
    of columns.
    """

    rotates = True

    def __init__(self, shape: ModelShape, options: RopeOptions) -> None:
        assert shape.head_dim % 2 == 0, "head dim must be even"
        self.base, self.width = options.base, shape.head_dim

    def encode_all(
        self,
        heads: Sequence[Tensor],
        first: int = 0,
        step: int = 1,
        rotation: Rotation | None = None,
    ) -> Sequence[Tensor]:
        """Rotate in fp32 or wider, all tensors as one, which takes a GPU half of the launches."""
        x_BNTH = torch.cat(list(heads), 1) if heads[1:] else heads[0]
        cos_Tj, sin_Tj = rotation or self._rotation(x_BNTH, x_BNTH.shape[2], first, step)
        a_BNTj, b_BNTj = x_BNTH.to(cos_Tj.dtype).chunk(2, -1)
        rotated = (a_BNTj * cos_Tj - b_BNTj * sin_Tj, b_BNTj * cos_Tj + a_BNTj * sin_Tj)
        rotated_BNTH = torch.cat(rotated, -1).to(x_BNTH.dtype)
        return rotated_BNTH.split([each.shape[1] for each in heads], 1)

    def rotation(self, x_BTC: Tensor, first: int) -> Rotation | None:
        return self._rotation(x_BTC, x_BTC.shape[1], first, 1)

    def _rotation(self, like: Tensor, count: int, first: int, step: int) -> Rotation:
        """Return cosines and sines in fp32 or wider, on the device of ``like``."""
        wide = torch.promote_types(like.dtype, torch.float32)
        angles_Tj = self._angles(like.device, count, first, step)
        return angles_Tj.cos().to(wide), angles_Tj.sin().to(wide)

    def _angles(self, device: torch.device, count: int, first: int, step: int) -> Tensor:
        """Return the angles in float64: fp32 is off by a fraction of a radian at late positions."""
        # No table is kept: a buffer of the module would be cast together with its parameters.
        dtype = torch.float64
        tokens_T = torch.arange(first, first + count * step, step, dtype=dtype, device=device)
        pairs_j = torch.arange(self.width // 2, dtype=dtype, device=device)
        return tokens_T[:, None] * self.base ** (-2 * pairs_j / self.width)
