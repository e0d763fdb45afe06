"""Combination of attention components, and the chunks processed by the row engine.

B batch, T tokens, N heads, H head dim.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gpt2.attention.rows.head_mean import HeadMean
from gpt2.attention.rows.parts import Chunk, Gate, Pattern, ScoreTerm

# Elements of a chunk's scores: on a CPU a chunk should fit into the L2 cache, on a GPU it should be
# large enough to saturate the device.
CPU_CHUNK_ELEMENTS = 1 << 18
GPU_CHUNK_ELEMENTS = 1 << 25
# Minimum rows per chunk: matrix products with fewer rows are inefficient.
FEWEST_ROWS = 32

# Learnable tensors, or their gradients, of every component differentiated by the engine.
Inputs = dict[ScoreTerm | Gate, list[Tensor]]


@dataclass(frozen=True)
class RowPlan:
    """Pattern, score terms, gates, optional weight reader, and dropout on the weights."""

    pattern: Pattern
    terms: Sequence[ScoreTerm] = ()
    gates: Sequence[Gate] = ()
    reader: HeadMean | None = None
    dropout: float = 0.0

    def parts(self) -> list[ScoreTerm | Gate]:
        """Return the terms, and the gates that scale scores."""
        return [*self.terms, *(gate for gate in self.gates if gate.scales_scores)]

    def inputs(self) -> list[Tensor]:
        """Return the learnable tensors of all components, in order."""
        return [tensor for part in self.parts() for tensor in part.inputs()]

    def by_part(self, tensors: Sequence[Tensor]) -> Inputs:
        """Group ``tensors``, in the order of ``inputs``, by component."""
        remaining = iter(tensors)
        return {part: [next(remaining) for _ in part.inputs()] for part in self.parts()}

    def chunks(self, q_BNTH: Tensor) -> Iterator[Chunk]:
        """Yield the rows in order, in chunks of similar height."""
        batch, heads, length, _ = q_BNTH.shape
        elements = CPU_CHUNK_ELEMENTS if q_BNTH.device.type == "cpu" else GPU_CHUNK_ELEMENTS
        highest = max(FEWEST_ROWS, elements // (batch * heads * length))
        height = math.ceil(length / math.ceil(length / highest))
        for first in range(0, length, height):
            yield Chunk(first, min(first + height, length), self.pattern.left(first))

    def drop(self, weights_BNrc: Tensor, generator: Generator | None) -> Tensor | None:
        """Return a dropout mask (0 or 1/(1−p)) for the weights; None without dropout."""
        if not self.dropout:
            return None
        keep = 1 - self.dropout
        return torch.empty_like(weights_BNrc).bernoulli_(keep, generator=generator).div_(keep)


def default_generator(device: torch.device) -> Generator:
    """Return the generator used by dropout; checkpoints contain its state."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index]


def per_query_head(x_BKTH: Tensor, heads: int) -> Tensor:
    """Return key or value heads repeated for the query heads that share them: BNTH."""
    shared = heads // x_BKTH.shape[1]
    return x_BKTH if shared == 1 else x_BKTH.repeat_interleave(shared, dim=1)
