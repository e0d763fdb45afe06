"""Exact bottom-k selection over very many scores, without sorting or concatenating them.

The bits of float32 numbers, read as integers with the negative ones flipped, have the same order as
the numbers. Two 16-bit histograms, the second inside the bin selected by the first, therefore give
the exact k-th lowest score over any number of tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce

import torch

_BITS = 16
_BINS = 1 << _BITS
# Elements per chunk: bounds temporaries, but each chunk is a kernel launch on a GPU.
_CHUNK_ELEMENTS = 1 << 20


def lowest(scores: Mapping[str, torch.Tensor], count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield, for each name, a boolean mask of the scores among the ``count`` lowest of all scores.

    Scores are float32. Ties at the threshold are selected in the order of the mapping and, within a
    tensor, of the flattened elements: exactly ``count`` are selected, and the result is
    deterministic.
    """
    threshold, ties = _threshold(scores.values(), count)
    for name, tensor in scores.items():
        selected = torch.empty_like(tensor, dtype=torch.bool)
        for chunk, mask in zip(_split(tensor), _split(selected), strict=True):
            keys = _keys(chunk)
            torch.lt(keys, threshold, out=mask)
            if ties:
                tied = (keys == threshold).nonzero().flatten()[:ties]
                mask[tied] = True
                ties -= len(tied)
        yield name, selected


def _threshold(tensors: Iterable[torch.Tensor], count: int) -> tuple[int, int]:
    """Return the key above the ``count`` lowest, and the number of ties at the key to include."""
    chunks = [chunk for tensor in tensors for chunk in _split(tensor)]
    digit, _, _ = _rank((_keys(c) >> _BITS for c in chunks), -_BINS // 2, count)
    first = digit * _BINS
    # Keys outside the bin are clamped to the values just below and just above the bin.
    clamped = (_keys(c).clamp(first - 1, first + _BINS) for c in chunks)
    key, below, equal = _rank(clamped, first - 1, count)
    ties = count - below
    return (key + 1, 0) if ties == equal else (key, ties)


def _rank(values: Iterator[torch.Tensor], least: int, count: int) -> tuple[int, int, int]:
    """Return the value of rank ``count`` (from 1), and how many values are below and equal to it.

    ``values`` are integers from ``least`` to ``least + _BINS + 1``.
    """
    counts = (torch.bincount(v - least, minlength=_BINS + 2) for v in values)
    histogram = reduce(torch.add, counts)
    cumulative = histogram.cumsum(0)
    index = int((cumulative < count).sum())
    equal = int(histogram[index])
    return least + index, int(cumulative[index]) - equal, equal


def _split(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).split(_CHUNK_ELEMENTS)


def _keys(scores: torch.Tensor) -> torch.Tensor:
    """Return int32 keys in the order of the float32 ``scores``."""
    assert scores.dtype == torch.float32, "keys are defined for float32 only"
    bits = scores.view(torch.int32)
    return bits ^ (bits >> 31 & 0x7FFFFFFF)
