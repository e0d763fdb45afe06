"""Options of native sparse attention (Yuan et al. 2025, arXiv 2502.11089)."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.options import PatternOptions, ProjectionOptions
from gpt2.shape import Shape
from lib.binding import symbol
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class NsaOptions(PatternOptions):
    """Three branches: compressed blocks, ``count`` selected blocks and ``window`` tokens.

    Compressed block i is tokens [i·stride, i·stride + compress), selection block j is
    [j·select, (j+1)·select). Tokens count from 0. ConfigError where the sizes do not go together.
    """

    name: ClassVar[str] = "nsa"
    attends: ClassVar[bool] = True

    compress: int = symbol("NSA_COMPRESS_BLOCK")
    stride: int = symbol("NSA_COMPRESS_STRIDE")
    select: int = symbol("NSA_SELECT_BLOCK")
    # Selected blocks of a token, those that are forced (first, own, previous) included.
    count: int = symbol("NSA_SELECT_COUNT")
    window: int = symbol("NSA_WINDOW")
    shared_kv: bool = symbol("NSA_SHARED_KV")
    # mean, or mlp: the mean and an MLP of the block.
    phi: str = symbol("NSA_PHI")
    hidden: int = symbol("NSA_PHI_HIDDEN")
    # sigmoid or softmax.
    gate: str = symbol("NSA_GATE")

    def __post_init__(self) -> None:
        wrong = []
        for name, size in (("COMPRESS", self.compress), ("SELECT", self.select)):
            if size % self.stride:
                what = f"{size} is not a multiple of NSA_COMPRESS_STRIDE={self.stride}"
                wrong.append(Problem(f"NSA_{name}_BLOCK: {what}"))
        if self.compress > self.select:
            what = f"{self.compress} is above NSA_SELECT_BLOCK={self.select}"
            wrong.append(Problem(f"NSA_COMPRESS_BLOCK: {what}"))
        if self.count < 3:
            what = f"{self.count} leaves no room for the first, the own and the previous block"
            wrong.append(Problem(f"NSA_SELECT_COUNT: {what}; at least 3"))
        if wrong:
            raise ConfigError(*wrong)

    def compressed(self, tokens: int) -> int:
        """Compressed blocks that are complete after ``tokens`` tokens: those the last one sees."""
        return max(0, (tokens - self.compress) // self.stride + 1)

    def pairs(self, length: int) -> tuple[int, int, int]:
        """Query-key pairs of a head in ``length`` tokens: compressed, selected, window."""
        complete = max(0, length - self.compress + 1)
        steps, rest = divmod(complete, self.stride)
        compressed = complete + self.stride * steps * (steps - 1) // 2 + steps * rest
        window = min(self.window, length)
        windowed = window * (window + 1) // 2 + (length - window) * window
        return compressed, selected_pairs(length, self.select, self.count), windowed

    def mean_keys(self, length: int) -> float:
        """Of the three branches together."""
        return sum(self.pairs(length)) / length

    def cached_tokens(self, length: int) -> int:
        """All: any block may be selected again."""
        return length

    def check(self, shape: Shape) -> None:
        """ConfigError with dropout, or with a block that never is complete."""
        wrong = []
        if shape.dropout:
            what = f"DROPOUT: {shape.dropout} with ATTENTION_PATTERN_NSA, which drops no weights"
            wrong.append(Problem(f"{what}; set DROPOUT=0.0"))
        if self.compress > shape.block_size:
            what = f"{self.compress} is above BLOCK_SIZE={shape.block_size}"
            wrong.append(Problem(f"NSA_COMPRESS_BLOCK: {what}; no block would be complete"))
        if wrong:
            raise ConfigError(*wrong)

    def weights(self, shape: Shape, projection: ProjectionOptions) -> int:
        """Keys and values of two branches, two MLPs, and a gate for each head and branch."""
        own = 0 if self.shared_kv else 2 * shape.n_embd * projection.cached_numbers(shape)
        return own + 2 * self._phi_weights(shape) + 3 * shape.n_head * shape.n_embd

    def num_params(self, shape: Shape, projection: ProjectionOptions) -> int:
        """The weights, biases of keys, values and gates, and two position embeddings."""
        biased = shape.bias and not self.shared_kv
        biases = 2 * projection.cached_numbers(shape) if biased else 0
        positions = 2 * self.compress * shape.head_dim if self.phi == "mlp" else 0
        return self.weights(shape, projection) + biases + positions + 3 * shape.n_head

    def flops_per_token(self, shape: Shape, projection: ProjectionOptions) -> float:
        """A multiply and an add for each weight; an MLP runs once for a block of a key head."""
        heads = projection.cached_numbers(shape) // (2 * shape.head_dim)
        blocks = self.compressed(shape.block_size) / shape.block_size
        once = self.weights(shape, projection) - 2 * self._phi_weights(shape)
        return 2 * once + 4 * self._phi_weights(shape) * heads * blocks

    def cached_numbers(self, shape: Shape, projection: ProjectionOptions, length: int) -> int:
        """Compressed keys and values; of branches with their own, what later blocks and windows need."""
        blocks = self.compressed(length)
        tokens = blocks
        if not self.shared_kv:
            tokens += length - blocks * self.stride + min(length, self.window - 1)
        return tokens * projection.cached_numbers(shape)

    def _phi_weights(self, shape: Shape) -> int:
        """Of one of the two MLPs."""
        return self.hidden * (self.compress + 1) * shape.head_dim if self.phi == "mlp" else 0


def selected_pairs(length: int, select: int, count: int) -> int:
    """Query-key pairs of the selected branch for one head: every block but a token's own is whole."""
    blocks, rest = divmod(length, select)
    most = min(blocks, count)
    # Blocks before the own one: 0, 1, 2 … up to count − 1.
    before = most * (most - 1) // 2 + (blocks - most) * (count - 1)
    whole = before * select + rest * min(count - 1, blocks)
    own = blocks * (select * (select + 1) // 2) + rest * (rest + 1) // 2
    return whole * select + own
