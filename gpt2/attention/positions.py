"""Position encodings applied to queries and keys.

B batch, N heads, T tokens, H head dim, j the H/2 pairs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gpt2.attention.options import RopeOptions
from gpt2.shape import ModelShape


class PositionEncoding(ABC):
    """Position encoding, applied to the queries and to the keys of a block before scores."""

    def __call__(self, x_BNTH: Tensor, first: int = 0, step: int = 1) -> Tensor:
        """Encode ``x``, with tokens at positions ``first``, ``first`` + ``step`` and so on."""
        return self.encode_all([x_BNTH], first, step)[0]

    @abstractmethod
    def encode_all(self, heads: Sequence[Tensor], first: int = 0, step: int = 1) -> list[Tensor]:
        """Encode tensors BNTH of the same tokens, width and dtype; N may differ."""


class Learned(PositionEncoding):
    """Identity: position embeddings are added to x before attention."""

    def encode_all(self, heads: Sequence[Tensor], first: int = 0, step: int = 1) -> list[Tensor]:
        """Return the tensors unchanged."""
        return list(heads)


class Rope(PositionEncoding):
    """Rotary encoding per head (Su et al. 2021, arXiv 2104.09864).

    Elements j and j + H/2 form a pair, as in GPT-NeoX and Llama. The paper pairs 2j and 2j + 1, which is equivalent up to the order of the columns of a head.
    """

    def __init__(self, shape: ModelShape, options: RopeOptions) -> None:
        assert shape.head_dim % 2 == 0, "head dim must be even"
        self.base = options.base

    def encode_all(self, heads: Sequence[Tensor], first: int = 0, step: int = 1) -> list[Tensor]:
        """Rotate in fp32 or wider and return the dtype of the tensors."""
        wide = torch.promote_types(heads[0].dtype, torch.float32)
        angles_Tj = self._angles(heads[0], first, step)
        cos_Tj, sin_Tj = angles_Tj.cos().to(wide), angles_Tj.sin().to(wide)
        return [self._rotate(x_BNTH, cos_Tj, sin_Tj) for x_BNTH in heads]

    def _rotate(self, x_BNTH: Tensor, cos_Tj: Tensor, sin_Tj: Tensor) -> Tensor:
        wide = cos_Tj.dtype
        a_BNTj, b_BNTj = x_BNTH.to(wide).chunk(2, -1)
        rotated = (a_BNTj * cos_Tj - b_BNTj * sin_Tj, b_BNTj * cos_Tj + a_BNTj * sin_Tj)
        return torch.cat(rotated, -1).to(x_BNTH.dtype)

    def _angles(self, x_BNTH: Tensor, first: int, step: int) -> Tensor:
        """Return the angles in float64: fp32 is off by a fraction of a radian at late positions.

        No table is cached: a buffer of the module would be cast together with its parameters.
        """
        count, width = x_BNTH.shape[-2:]
        dtype, device = torch.float64, x_BNTH.device
        tokens_T = torch.arange(first, first + count * step, step, dtype=dtype, device=device)
        pairs_j = torch.arange(width // 2, dtype=dtype, device=device)
        return tokens_T[:, None] * self.base ** (-2 * pairs_j / width)
