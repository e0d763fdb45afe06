"""What walks over blocks share: memory that is used again, and products that come out shifted."""

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class Masks:
    """Hides scores. Most chunks are masked alike, so what was made for one is kept."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, ...], Tensor] = {}

    def hide_(
        self, scores_grc: Tensor, since: int, stride: int = 1, complete: bool = False
    ) -> None:
        """−∞ where key c is not complete, or where it is: ``stride`` tokens after key c − 1.

        Key 0 is so ``since`` tokens before the token of row 0.
        """
        rows, keys = scores_grc.shape[-2:]
        place = (rows, keys, since, stride, complete)
        if place not in self.held:
            device = scores_grc.device
            tokens_r1 = torch.arange(since, since + rows, device=device)[:, None]
            complete_rc = tokens_r1 >= torch.arange(keys, device=device) * stride
            hidden_rc = complete_rc if complete else ~complete_rc
            most_rc = scores_grc.new_full((rows, keys), math.inf)
            self.held[place] = most_rc.masked_fill_(hidden_rc, -math.inf)
        # Several times as fast as to fill scores where a mask says so.
        torch.minimum(scores_grc, self.held[place], out=scores_grc)


class Buffers:
    """Memory that blocks take turns in: as it is used again it is in cache."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.held: dict[str, Tensor] = {}
        self.masks = Masks()

    def get(self, name: str, *shape: int) -> Tensor:
        """Of any content. The one of the same name before it is overwritten."""
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.held[name] = self.like.new_empty(size)
        return self.held[name][:size].view(shape)

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """Of two matrices."""
        return torch.mm(left, right, out=self.get(name, len(left), right.shape[1]))


def with_shift(rows: Tensor, factor: float, shift: Tensor, buffers: Buffers, name: str) -> Tensor:
    """[…, H] → [R, H + 1]: ``factor``·rows, whose products with columns that end in −1 come out less
    by ``shift``."""
    width = rows.shape[-1]
    found = buffers.get(name, *rows.shape[:-1], width + 1)
    torch.mul(rows, factor, out=found[..., :width])
    found[..., width] = shift
    return found.flatten(0, -2)


def ending_in_minus_one(columns: Tensor) -> Tensor:
    """[M, H] → [M, H + 1], columns for rows of ``with_shift``."""
    return torch.cat([columns, columns.new_full((len(columns), 1), -1.0)], -1)


def heads_of(k_BKSH: Tensor) -> list[tuple[int, int]]:
    """The key heads of all sequences."""
    batch, heads = k_BKSH.shape[:2]
    return [(b, k) for b in range(batch) for k in range(heads)]


def wide(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)
