"""Options of the grouped projection (Ainslie et al. 2023, arXiv 2305.13245)."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import Shape
from lib.binding import symbol


@dataclass(frozen=True)
class GroupedOptions:
    """``n_kv_head`` key/value heads for ``n_head`` query heads; 1 is multi-query attention."""

    name: ClassVar[str] = "grouped"

    n_kv_head: int = symbol("N_KV_HEAD")

    def weights(self, shape: Shape) -> int:
        """C² for the queries, and C × n_kv_head·H for the keys and for the values."""
        return shape.n_embd * (shape.n_embd + 2 * self.n_kv_head * shape.head_dim)

    def num_params(self, shape: Shape) -> int:
        """The weights, and one bias a column."""
        columns = shape.n_embd + 2 * self.n_kv_head * shape.head_dim
        return self.weights(shape) + (columns if shape.bias else 0)

    def flops_per_token(self, shape: Shape) -> int:
        """One multiply and one add per weight."""
        return 2 * self.weights(shape)

    def cached_numbers(self, shape: Shape) -> int:
        """2·n_kv_head·H."""
        return 2 * self.n_kv_head * shape.head_dim

    def query_numbers(self, shape: Shape) -> int:
        """C."""
        return shape.n_embd
