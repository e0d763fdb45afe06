"""Options of the dense projection."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import Shape


@dataclass(frozen=True)
class DenseOptions:
    """Options of GPT-2's ``c_attn``: one C → 3C matrix in the order q, k, v."""

    name: ClassVar[str] = "dense"

    def weights(self, shape: Shape) -> int:
        """Return 3C²."""
        return 3 * shape.n_embd**2

    def num_params(self, shape: Shape) -> int:
        """Return 3C² weights plus 3C biases if enabled."""
        return self.weights(shape) + (3 * shape.n_embd if shape.bias else 0)

    def flops_per_token(self, shape: Shape) -> int:
        """Return two FLOPs (multiply and add) per weight."""
        return 2 * self.weights(shape)

    def cached_numbers(self, shape: Shape) -> int:
        """Return 2C: the keys and values of all heads."""
        return 2 * shape.n_embd

    def query_numbers(self, shape: Shape) -> int:
        """Return C."""
        return shape.n_embd
