"""Options of native sparse attention (Yuan et al. 2025, arXiv 2502.11089)."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.options import Note, PatternOptions, ProjectionOptions
from gpt2.shape import Shape
from lib.binding import symbol
from lib.errors import ConfigError, Problem

# In the order of gates, own keys and outputs.
BRANCHES = ("compressed", "selected", "window")


@dataclass(frozen=True)
class NsaOptions(PatternOptions):
    """Three branches: compressed blocks, ``count`` selected blocks and ``window`` tokens.

    Compressed block i is tokens [i·stride, i·stride + compress), selection block j is
    [j·select, (j+1)·select). Tokens count from 0. Sizes that nothing needs are 0. ConfigError where
    they do not go together, or no branch is left.
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
    # score or random.
    select_by: str = symbol("NSA_SELECT_BY")
    branch_compressed: bool = symbol("NSA_BRANCH_COMPRESSED")
    branch_selected: bool = symbol("NSA_BRANCH_SELECTED")
    branch_window: bool = symbol("NSA_BRANCH_WINDOW")
    # How selected blocks are computed: auto, blocks or gather.
    backend: str = symbol("NSA_BACKEND", form=True)
    # What gather takes at once: lists, merged or, merged from ranges_min tokens on, adaptive.
    ranges: str = symbol("NSA_RANGES", form=True)
    ranges_min: int = symbol("NSA_RANGES_MIN_S", form=True)

    def __post_init__(self) -> None:
        wrong = []
        if not self.branches:
            wrong.append(Problem("NSA_BRANCH_WINDOW: n, and no other branch is left"))
        for name, size in (("COMPRESS", self.compress), ("SELECT", self.select)):
            if self.stride and size % self.stride:
                what = f"{size} is not a multiple of NSA_COMPRESS_STRIDE={self.stride}"
                wrong.append(Problem(f"NSA_{name}_BLOCK: {what}"))
        if self.ranks and self.compress > self.select:
            what = f"{self.compress} is above NSA_SELECT_BLOCK={self.select}"
            wrong.append(Problem(f"NSA_COMPRESS_BLOCK: {what}"))
        if self.branch_selected and self.count < 3:
            what = f"{self.count} leaves no room for the first, the own and the previous block"
            wrong.append(Problem(f"NSA_SELECT_COUNT: {what}; at least 3"))
        if wrong:
            raise ConfigError(*wrong)

    @property
    def branches(self) -> tuple[str, ...]:
        """Those that are built, of ``BRANCHES``."""
        built = (self.branch_compressed, self.branch_selected, self.branch_window)
        return tuple(name for name, there in zip(BRANCHES, built, strict=True) if there)

    @property
    def owner(self) -> str:
        """The branch whose keys and values are the projection's."""
        return "selected" if self.branch_selected else self.branches[0]

    @property
    def ranks(self) -> bool:
        """Whether blocks are selected by their score."""
        return self.branch_selected and self.select_by == "score"

    @property
    def compresses(self) -> bool:
        """Whether there are compressed keys, if only to rank blocks."""
        return self.branch_compressed or self.ranks

    @property
    def compresses_attended(self) -> bool:
        """Whether keys that are compressed are those of a branch of tokens too."""
        if self.branch_compressed:
            return self.shared_kv and len(self.branches) > 1
        return self.ranks

    @property
    def learns_phi(self) -> bool:
        """Whether MLPs take part in compressing."""
        return self.branch_compressed and self.phi == "mlp"

    def compressed(self, tokens: int) -> int:
        """Compressed blocks that are complete after ``tokens`` tokens: those the last one sees."""
        return max(0, (tokens - self.compress) // self.stride + 1) if self.compresses else 0

    def selects_all(self, length: int) -> bool:
        """Whether every query of ``length`` tokens selects every block before it."""
        return self.branch_selected and self.count * self.select >= length

    def pairs(self, length: int) -> tuple[int, int, int]:
        """Query-key pairs of a head in ``length`` tokens: compressed, selected, window.

        Compressed keys that only rank blocks count, though they have no values.
        """
        compressed = 0
        if self.compresses:
            complete = max(0, length - self.compress + 1)
            steps, rest = divmod(complete, self.stride)
            compressed = complete + self.stride * steps * (steps - 1) // 2 + steps * rest
        selected = selected_pairs(length, self.select, self.count) if self.branch_selected else 0
        windowed = window_pairs(length, self.window) if self.branch_window else 0
        return compressed, selected, windowed

    def mean_keys(self, length: int) -> float:
        """Of the branches together."""
        return sum(self.pairs(length)) / length

    def kept(self, branch: str, length: int) -> int:
        """Of ``length`` tokens those whose keys and values a branch keeps for the next one."""
        # Any block may be selected again. The others are rings: a block's tokens, and a window's.
        most = {"selected": length, "compressed": self.compress, "window": self.window}
        return min(length, most[branch])

    def cached_tokens(self, length: int) -> int:
        """Of the projection's keys and values: what their branch needs, or all that share them."""
        sharing = self.branches if self.shared_kv else (self.owner,)
        return max(self.kept(branch, length) for branch in sharing)

    def unrotated_tokens(self, length: int) -> int:
        """Those of the next block to be compressed, where rotated keys are kept of them too."""
        return self.kept("compressed", length) if self.compresses_attended else 0

    def notes(self, shape: Shape) -> list[Note]:
        """How many pairs full attention has, and whether selection leaves anything out."""
        length, found = shape.block_size, list[Note]()
        if self.selects_all(length):
            sizes = f"NSA_SELECT_COUNT={self.count} x NSA_SELECT_BLOCK={self.select}"
            what = f"selection takes every block: {sizes} >= BLOCK_SIZE={length}"
            found.append(Note(what, warns=True))
        ratio = (length + 1) / 2 / self.mean_keys(length)
        text = f"query-key pairs, full attention / NSA: {ratio:.2f}"
        less = ratio < 1
        return [*found, Note(text + ", so full attention does less" * less, warns=less)]

    def check(self, shape: Shape) -> None:
        """ConfigError with dropout, with a block that never is complete, or nothing to draw."""
        wrong = []
        if shape.dropout:
            what = f"DROPOUT: {shape.dropout} with ATTENTION_PATTERN_NSA, which drops no weights"
            wrong.append(Problem(f"{what}; set DROPOUT=0.0"))
        if self.compress > shape.block_size:
            what = f"{self.compress} is above BLOCK_SIZE={shape.block_size}"
            wrong.append(Problem(f"NSA_COMPRESS_BLOCK: {what}; no block would be complete"))
        if self.select_by == "random" and self.selects_all(shape.block_size):
            sizes = f"{self.count} x NSA_SELECT_BLOCK={self.select} >= BLOCK_SIZE"
            what = f"NSA_SELECT_BY: random, but selection takes every block: {sizes}"
            fewer = (shape.block_size - 1) // self.select
            advice = f"type: SET=NSA_SELECT_COUNT={fewer}, or a larger BLOCK_SIZE"
            if fewer < 3:
                advice = "set NSA_SELECT_BLOCK to less, or BLOCK_SIZE to more"
            wrong.append(Problem(f"{what}={shape.block_size}", next=advice))
        if wrong:
            raise ConfigError(*wrong)

    def weights(self, shape: Shape, projection: ProjectionOptions) -> int:
        """Keys and values of other branches than the owner, two MLPs, gates of heads and branches."""
        own = self._own() * shape.n_embd * projection.cached_numbers(shape)
        return own + 2 * self._phi_weights(shape) + self._gates(shape) * shape.n_embd

    def num_params(self, shape: Shape, projection: ProjectionOptions) -> int:
        """The weights, biases of keys, values and gates, and two position embeddings."""
        biases = self._own() * projection.cached_numbers(shape) if shape.bias else 0
        positions = 2 * self.compress * shape.head_dim if self.learns_phi else 0
        return self.weights(shape, projection) + biases + positions + self._gates(shape)

    def flops_per_token(self, shape: Shape, projection: ProjectionOptions) -> float:
        """A multiply and an add for each weight; an MLP runs once for a block of a key head.

        Keys that only rank blocks have no product with values, which ``mean_keys`` would count.
        """
        heads = projection.cached_numbers(shape) // (2 * shape.head_dim)
        blocks = self.compressed(shape.block_size) / shape.block_size
        once = self.weights(shape, projection) - 2 * self._phi_weights(shape)
        own = 2 * once + 4 * self._phi_weights(shape) * heads * blocks
        ranked = 0 if self.branch_compressed else self.pairs(shape.block_size)[0]
        return own - 2 * shape.n_embd * ranked / shape.block_size

    def cached_numbers(self, shape: Shape, projection: ProjectionOptions, length: int) -> int:
        """Compressed keys and values; of branches with their own, their tokens."""
        numbers = projection.cached_numbers(shape)
        blocks = self.compressed(length) * numbers
        others = [] if self.shared_kv else [name for name in self.branches if name != self.owner]
        own = sum(self.kept(name, length) for name in others) * numbers
        # Keys alone, where they only rank.
        return own + (blocks if self.branch_compressed else blocks // 2)

    def _own(self) -> int:
        """Branches with keys and values of their own."""
        return 0 if self.shared_kv else len(self.branches) - 1

    def _gates(self, shape: Shape) -> int:
        """One branch alone has none."""
        return len(self.branches) * shape.n_head if len(self.branches) > 1 else 0

    def _phi_weights(self, shape: Shape) -> int:
        """Of one of the two MLPs."""
        return self.hidden * (self.compress + 1) * shape.head_dim if self.learns_phi else 0


def window_pairs(length: int, window: int) -> int:
    """Query-key pairs of a window of ``window`` tokens for one head."""
    window = min(window, length)
    return window * (window + 1) // 2 + (length - window) * window


def selected_pairs(length: int, select: int, count: int) -> int:
    """Query-key pairs of the selected branch for one head: every block but a token's own is whole."""
    blocks, rest = divmod(length, select)
    most = min(blocks, count)
    # Blocks before the own one: 0, 1, 2 … up to count − 1.
    before = most * (most - 1) // 2 + (blocks - most) * (count - 1)
    whole = before * select + rest * min(count - 1, blocks)
    own = blocks * (select * (select + 1) // 2) + rest * (rest + 1) // 2
    return whole * select + own
