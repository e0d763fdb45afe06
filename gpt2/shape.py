"""The dimensions of a GPT-2 that every part of it is built from."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class Shape:
    """Width, depth and vocabulary; names are those of GPT-2's own configuration."""

    n_layer: int = symbol("N_LAYER")
    n_head: int = symbol("N_HEAD")
    n_embd: int = symbol("N_EMBD")
    # Context length in tokens (GPT-2's n_positions).
    block_size: int = symbol("BLOCK_SIZE")
    # Rows of the embedding are padded to a multiple of this; padding never enters a softmax.
    vocab_multiple: int = symbol("VOCAB_MULTIPLE")
    dropout: float = symbol("DROPOUT", low=0.0, high=0.9)
    bias: bool = symbol("BIAS")
    # gelu_tanh (GPT-2's approximation) or gelu_exact.
    activation: str = symbol("ACTIVATION")
    # Tokens of the tokenizer; not a symbol, it follows from TOKENIZER.
    vocab_size: int = 0

    @property
    def head_dim(self) -> int:
        """Width of one head, H = C / N."""
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: ``vocab_size`` rounded up to ``vocab_multiple``."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def nearest_multiple(value: float, multiple: int) -> int:
    """``value`` rounded to the nearest multiple, at least one of it."""
    return max(multiple, int(value / multiple + 0.5) * multiple)
