"""Dimensions of a GPT-2 model shared by all components, and what a component costs."""

from collections.abc import Iterable
from dataclasses import dataclass

from .lib_config_field import kconfig_field


@dataclass(frozen=True)
class ModelShape:
    """Width, depth and vocabulary of a model; field names follow GPT-2's configuration."""

    n_layer: int = kconfig_field("N_LAYER")
    n_head: int = kconfig_field("N_HEAD")
    n_embd: int = kconfig_field("N_EMBD")
    # Context length in tokens (GPT-2's n_positions).
    block_size: int = kconfig_field("BLOCK_SIZE")
    # Rows of the embedding are padded to a multiple of this; padding never enters a softmax.
    vocab_multiple: int = kconfig_field("VOCAB_MULTIPLE")
    dropout: float = kconfig_field("DROPOUT", low=0.0, high=0.9)
    bias: bool = kconfig_field("BIAS")
    # Size of the tokenizer's vocabulary; not a symbol: determined by TOKENIZER.
    vocab_size: int = 0

    @property
    def head_dim(self) -> int:
        """Return the width of one head, H = C / N."""
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Return the rows of the token embedding: ``vocab_size`` padded to ``vocab_multiple``."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def gpt2_params(self) -> int:
        """Return the parameters of GPT-2 with these dimensions."""
        width, bias = self.n_embd, self.bias
        block = 12 * width**2 + (2 + 11 * bias) * width
        embeddings = (self.padded_vocab_size + self.block_size) * width
        return embeddings + self.n_layer * block + (1 + bias) * width


@dataclass(frozen=True)
class Cost:
    """Parameters and forward FLOPs of a component in one block, with a multiply-add counted as two."""

    # Elements of matrices, each of which takes two FLOPs per token.
    weights: int = 0
    # Other parameters: biases, scales, factors of heads.
    vectors: int = 0
    # FLOPs per token besides those of the weights.
    other_flops: float = 0.0

    @property
    def params(self) -> int:
        """Return all parameters."""
        return self.weights + self.vectors

    @property
    def flops(self) -> float:
        """Return all FLOPs per token."""
        return 2 * self.weights + self.other_flops

    @classmethod
    def of(cls, parts: "Iterable[Cost]") -> "Cost":
        """Return the cost of all parts together."""
        every = list(parts)
        return cls(
            sum(part.weights for part in every),
            sum(part.vectors for part in every),
            sum(part.other_flops for part in every),
        )


def nearest_multiple(value: float, multiple: int) -> int:
    """Return ``value`` rounded to the nearest positive multiple of ``multiple``."""
    return max(multiple, int(value / multiple + 0.5) * multiple)
