"""Options of the grouped projection (Ainslie et al. 2023, arXiv 2305.13245)."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import Shape
from lib.binding import symbol


@dataclass(frozen=True)
class GroupedOptions:
    """Options of ``n_kv_head`` key/value heads shared by query heads (1 is MQA)."""

    name: ClassVar[str] = "grouped"

    n_kv_head: int = symbol("N_KV_HEAD")

    def weights(self, shape: Shape) -> int:
        """Return C² for queries plus C × n_kv_head·H each for keys and values."""
        return shape.n_embd * (shape.n_embd + 2 * self.n_kv_head * shape.head_dim)

    def num_params(self, shape: Shape) -> int:
        """Return the weights plus one bias per column if enabled."""
        columns = shape.n_embd + 2 * self.n_kv_head * shape.head_dim
        return self.weights(shape) + (columns if shape.bias else 0)

    def flops_per_token(self, shape: Shape) -> int:
        """Return two FLOPs (multiply and add) per weight."""
        return 2 * self.weights(shape)

    def cached_numbers(self, shape: Shape) -> int:
        """Return 2·n_kv_head·H."""
        return 2 * self.n_kv_head * shape.head_dim

    def query_numbers(self, shape: Shape) -> int:
        """Return C."""
        return shape.n_embd
