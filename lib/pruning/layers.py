"""Layers of a model that pruning or an optimizer treats differently from all others."""

from collections.abc import Sequence

from torch import nn


class NeverPruned(nn.Module):
    """Base class of modules whose weights are never pruned, such as a gate (zeros shift it)."""


class PaddedEmbedding(nn.Embedding):
    """Embedding table with unused padding rows from ``used_rows`` on.

    Padding rows are zero without any pruning, so they count neither as pruned nor as prunable.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, used_rows: int) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.used_rows = used_rows


class PaddedHead(nn.Linear):
    """Output head that is not tied to an embedding table, with unused padding rows as the table.

    Weight decay and pruning treat it as the table that it would be tied to.
    """

    def __init__(self, in_features: int, out_features: int, used_rows: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.used_rows = used_rows


class StackedLinear(nn.Linear):
    """Linear layer whose weight stacks matrices with ``rows`` rows each, such as those of q, k and v.

    An optimizer of whole matrices updates each of them by itself.
    """

    def __init__(self, in_features: int, rows: Sequence[int], bias: bool) -> None:
        super().__init__(in_features, sum(rows), bias=bias)
        self.rows = tuple(rows)
