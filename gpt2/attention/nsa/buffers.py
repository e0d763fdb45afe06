"""Scratch memory, cached masks and shifted matrix products for the chunked kernels."""

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class Masks:
    """Cache of attention masks. Most chunks need the same mask, so each mask is built once."""

    def __init__(self) -> None:
        self.masks: dict[tuple[int, ...], Tensor] = {}

    def hide_(
        self, scores_grc: Tensor, since: int, stride: int = 1, complete: bool = False
    ) -> None:
        """Set scores to −∞ in place for keys that are incomplete, or complete if ``complete``.

        Key c becomes complete ``stride`` tokens after key c − 1, and key 0 becomes complete
        ``since`` tokens before the token of row 0.
        """
        rows, keys = scores_grc.shape[-2:]
        key = (rows, keys, since, stride, complete)
        if key not in self.masks:
            device = scores_grc.device
            tokens_r1 = torch.arange(since, since + rows, device=device)[:, None]
            complete_rc = tokens_r1 >= torch.arange(keys, device=device) * stride
            hidden_rc = complete_rc if complete else ~complete_rc
            bound_rc = scores_grc.new_full((rows, keys), math.inf)
            self.masks[key] = bound_rc.masked_fill_(hidden_rc, -math.inf)
        # Several times faster than masked_fill_ with a boolean mask.
        torch.minimum(scores_grc, self.masks[key], out=scores_grc)


class Buffers:
    """Named scratch tensors that all blocks reuse, so that the memory stays in the CPU cache."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.tensors: dict[str, Tensor] = {}
        self.masks = Masks()

    def get(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialized tensor; it overwrites the previous tensor of the same name."""
        size = math.prod(shape)
        if name not in self.tensors or self.tensors[name].numel() < size:
            self.tensors[name] = self.like.new_empty(size)
        return self.tensors[name][:size].view(shape)

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Return the matrix product ``left`` · ``right`` in the scratch tensor ``name``."""
        return torch.mm(left, right, out=self.get(name, len(left), right.shape[1]))


def with_shift(rows: Tensor, factor: float, shift: Tensor, buffers: Buffers, name: str) -> Tensor:
    """Return ``factor``·rows with ``shift`` appended as a last column, […, H] → [R, H + 1].

    The product of such a row with a column from ``ending_in_minus_one`` is the plain product minus
    the row's ``shift``.
    """
    width = rows.shape[-1]
    shifted = buffers.get(name, *rows.shape[:-1], width + 1)
    torch.mul(rows, factor, out=shifted[..., :width])
    shifted[..., width] = shift
    return shifted.flatten(0, -2)


def ending_in_minus_one(columns: Tensor) -> Tensor:
    """Append a column of −1, [M, H] → [M, H + 1], to match the rows of ``with_shift``."""
    return torch.cat([columns, columns.new_full((len(columns), 1), -1.0)], -1)


def heads_of(k_BKSH: Tensor) -> list[tuple[int, int]]:
    """Return the index pairs (sequence, key head) of all key heads in the batch."""
    batch, heads = k_BKSH.shape[:2]
    return [(b, k) for b in range(batch) for k in range(heads)]


def wide(x: Tensor) -> torch.dtype:
    """Return the accumulation dtype for ``x``: fp64 if ``x`` is fp64, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)
