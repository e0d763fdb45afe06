"""Exactly the k lowest of very many scores, without sorting or joining them.

float32 numbers keep their order when their bits are read as integers with the negative ones turned
round. So two histograms of 16 bits each, the second inside the bin that the first one found, give
the exact k-th lowest of any number of tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce

import torch

_BITS = 16
_BINS = 1 << _BITS
# Elements worked on at a time, to bound temporaries; a GPU pays for each piece, so not too few.
_PIECE = 1 << 20


def lowest(scores: Mapping[str, torch.Tensor], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """For each name, where its float32 scores are among the ``count`` lowest of all, as booleans.

    Equal scores at the border are taken in the order of the mapping and, within a tensor, of its
    flattened elements: the number taken is exactly ``count``, and the choice repeatable.
    """
    border, ties = _border(scores.values(), count)
    for name, tensor in scores.items():
        taken = torch.empty_like(tensor, dtype=torch.bool)
        for piece, part in zip(_split(tensor), _split(taken), strict=True):
            keys = _keys(piece)
            torch.lt(keys, border, out=part)
            if ties:
                tied = (keys == border).nonzero().flatten()[:ties]
                part[tied] = True
                ties -= len(tied)
        yield name, taken


def _border(tensors: Iterable[torch.Tensor], count: int) -> tuple[int, int]:
    """The key that the ``count`` lowest are below, and how many at the key itself join them."""
    pieces = [piece for tensor in tensors for piece in _split(tensor)]
    digit, _, _ = _rank((_keys(p) >> _BITS for p in pieces), -_BINS // 2, count)
    first = digit * _BINS
    # Keys outside the bin fall on the values before its first and after its last.
    clamped = (_keys(p).clamp(first - 1, first + _BINS) for p in pieces)
    key, below, equal = _rank(clamped, first - 1, count)
    ties = count - below
    return (key + 1, 0) if ties == equal else (key, ties)


def _rank(values: Iterator[torch.Tensor], least: int, count: int) -> tuple[int, int, int]:
    """The value of rank ``count`` (from 1), how many are below it, and how many are equal to it.

    ``values`` are integers from ``least`` to ``least + _BINS + 1``.
    """
    counts = (torch.bincount(v - least, minlength=_BINS + 2) for v in values)
    histogram = reduce(torch.add, counts)
    reached = histogram.cumsum(0)
    found = int((reached < count).sum())
    equal = int(histogram[found])
    return least + found, int(reached[found]) - equal, equal


def _split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).split(_PIECE)


def _keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 in the order of the float32 ``scores``."""
    assert scores.dtype == torch.float32, "the order of bits holds for float32"
    bits = scores.view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)
