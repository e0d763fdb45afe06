"""Options of attention and of its components; does not import torch.

Options declare the cost of a component, so that a plan can be printed and a built model can be
checked against it. FLOPs are forward FLOPs, with a multiply-add counted as two.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gpt2.attention import GATES, PATTERNS, POSITIONS, PROJECTIONS, TERMS
from gpt2.shape import ModelShape, nearest_multiple
from lib.config.field import SymbolValue, kconfig_field

# Interface of position-encoding options; does not import torch.


class PositionOptions(Protocol):
    """Options of a position encoding."""

    name: str
    # True if queries and keys are rotated instead of adding position embeddings to x.
    rotates: bool

    def num_params(self, shape: ModelShape) -> int:
        """Return the parameters of the whole model."""


# Options of learned positions.


@dataclass(frozen=True)
class LearnedOptions:
    """Options of GPT-2's ``wpe``: one embedding per position."""

    name: ClassVar[str] = "learned"
    rotates: ClassVar[bool] = False

    def num_params(self, shape: ModelShape) -> int:
        """Return ``block_size`` · C."""
        return shape.block_size * shape.n_embd


# Options of rotary positions (Su et al. 2021, arXiv 2104.09864).


@dataclass(frozen=True)
class RopeOptions:
    """Options of RoPE: pair j of H elements is rotated by t · ``base``^(−2j/H) at token t."""

    name: ClassVar[str] = "rope"
    rotates: ClassVar[bool] = True

    base: float = kconfig_field("ROPE_BASE", low=2.0, high=1e9)

    def num_params(self, shape: ModelShape) -> int:
        """Return 0."""
        return 0


class ProjectionOptions(Protocol):
    """Options of the query, key and value projection (output projection excluded)."""

    name: str

    def weights(self, shape: ModelShape) -> int:
        """Return the parameters of one block without biases."""

    def num_params(self, shape: ModelShape) -> int:
        """Return the parameters of one block with biases."""

    def flops_per_token(self, shape: ModelShape) -> int:
        """Return the forward FLOPs per token and block, without attention scores."""

    def cached_numbers(self, shape: ModelShape) -> int:
        """Return the cached key and value elements per token and block."""

    def query_numbers(self, shape: ModelShape) -> int:
        """Return the query elements per token as used in decoding."""


@dataclass(frozen=True)
class ConfigNote:
    """Note or warning about a configuration, shown before a run starts."""

    text: str
    warns: bool = False

    @property
    def tag(self) -> str:
        """Return the tag of the output line, WARN or NOTE."""
        return "WARN" if self.warns else "NOTE"


class PatternOptions(ABC):
    """Options of a pattern: which earlier tokens a token sees. By default without parameters."""

    name: ClassVar[str]
    # True if the module is an ``OwnAttention``: a kernel that replaces SDPA and the row engine.
    attends: ClassVar[bool] = False

    @abstractmethod
    def mean_keys(self, length: int) -> float:
        """Return the number of keys per query, averaged over ``length`` tokens."""

    @abstractmethod
    def cached_tokens(self, length: int) -> int:
        """Return the number of tokens, out of ``length``, with cached keys and values."""

    def unrotated_tokens(self, length: int) -> int:
        """Return the number of tokens with an additional cached copy of unrotated keys."""
        return 0

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError if the pattern does not fit the shape."""

    def notes(self, shape: ModelShape) -> list[ConfigNote]:
        """Return notes and warnings about the pattern at this context length."""
        return []

    def weights(self, shape: ModelShape, projection: ProjectionOptions) -> int:
        """Return the pattern's matrix parameters of one block, without biases."""
        return 0

    def num_params(self, shape: ModelShape, projection: ProjectionOptions) -> int:
        """Return the pattern's parameters of one block."""
        return 0

    def flops_per_token(self, shape: ModelShape, projection: ProjectionOptions) -> float:
        """Return the forward FLOPs of the pattern's parameters per token and block."""
        return 0.0

    def cached_numbers(self, shape: ModelShape, projection: ProjectionOptions, length: int) -> int:
        """Return cached elements for ``length`` tokens besides the projection's keys and values."""
        return 0


class ScoreComponentOptions(Protocol):
    """Options of a score term or gate: parameters and added cost."""

    name: str

    def num_params(self, shape: ModelShape) -> int:
        """Return the parameters of one block."""

    def flops_per_token(self, shape: ModelShape, keys: float) -> float:
        """Return the added forward FLOPs per token and block with ``keys`` visible keys."""

    @property
    def lacks_joined(self) -> str:
        """Return the features that only the row engine supports ("" if none)."""


class TermOptions(ScoreComponentOptions, Protocol):
    """Options of a score term."""

    @property
    def reach(self) -> int:
        """Return the number of earlier tokens with queries that affect the scores of a row."""


@dataclass(frozen=True)
class AttentionConfig:
    """Attention configuration: projection, pattern, positions, any terms, any gates."""

    projection: ProjectionOptions
    pattern: PatternOptions
    positions: PositionOptions
    terms: tuple[TermOptions, ...]
    gates: tuple[ScoreComponentOptions, ...]
    # auto, rows, joined, or an SDPA kernel (see forms.py); empty if the pattern has its own kernel.
    backend: str = kconfig_field("ATTENTION_BACKEND", form=True)

    @classmethod
    def from_values(cls, values: Mapping[str, SymbolValue]) -> "AttentionConfig":
        """Build the configured components. Raises ConfigError if a symbol is invalid."""
        (projection,) = PROJECTIONS.bind(values)
        (pattern,) = PATTERNS.bind(values)
        (positions,) = POSITIONS.bind(values)
        return cls(
            projection,
            pattern,
            positions,
            TERMS.bind(values),
            GATES.bind(values),
            backend=str(values["ATTENTION_BACKEND"]),
        )

    @property
    def reach(self) -> int:
        """Return the number of queries to cache for decoding."""
        return max((term.reach for term in self.terms), default=0)

    def cached_numbers(self, shape: ModelShape, length: int) -> int:
        """Return the cached elements for ``length`` tokens in the attention of one block."""
        tokens = self.pattern.cached_tokens(length)
        queries = min(tokens, self.reach) * self.projection.query_numbers(shape)
        extra = self.pattern.cached_numbers(shape, self.projection, length)
        pair = self.projection.cached_numbers(shape)
        if self.positions.rotates:
            extra += self.pattern.unrotated_tokens(length) * pair // 2
        return tokens * pair + queries + extra

    def weights(self, shape: ModelShape) -> int:
        """Return the matrix parameters of one block without biases, the base of the MLP ratio."""
        pattern = self.pattern.weights(shape, self.projection)
        return self.projection.weights(shape) + shape.n_embd**2 + pattern

    def num_params(self, shape: ModelShape) -> int:
        """Return the parameters of one block, including the output projection ``c_proj``."""
        c_proj = shape.n_embd**2 + (shape.n_embd if shape.bias else 0)
        parts = sum(part.num_params(shape) for part in (*self.terms, *self.gates))
        pattern = self.pattern.num_params(shape, self.projection)
        return self.projection.num_params(shape) + c_proj + pattern + parts

    def flops_per_token(self, shape: ModelShape) -> float:
        """Return the forward FLOPs per token and block, including scores and aggregation."""
        keys = self.pattern.mean_keys(shape.block_size)
        scores_and_values = 4 * shape.n_embd * keys
        parts = sum(part.flops_per_token(shape, keys) for part in (*self.terms, *self.gates))
        projections = self.projection.flops_per_token(shape) + 2 * shape.n_embd**2
        pattern = self.pattern.flops_per_token(shape, self.projection)
        return projections + scores_and_values + pattern + parts


# Options of the dense projection.


@dataclass(frozen=True)
class DenseOptions:
    """Options of GPT-2's ``c_attn``: one C → 3C matrix in the order q, k, v."""

    name: ClassVar[str] = "dense"

    def weights(self, shape: ModelShape) -> int:
        """Return 3C²."""
        return 3 * shape.n_embd**2

    def num_params(self, shape: ModelShape) -> int:
        """Return 3C² weights plus 3C biases if enabled."""
        return self.weights(shape) + (3 * shape.n_embd if shape.bias else 0)

    def flops_per_token(self, shape: ModelShape) -> int:
        """Return two FLOPs (multiply and add) per weight."""
        return 2 * self.weights(shape)

    def cached_numbers(self, shape: ModelShape) -> int:
        """Return 2C: the keys and values of all heads."""
        return 2 * shape.n_embd

    def query_numbers(self, shape: ModelShape) -> int:
        """Return C."""
        return shape.n_embd


# Options of the grouped projection (Ainslie et al. 2023, arXiv 2305.13245).


@dataclass(frozen=True)
class GroupedOptions:
    """Options of ``n_kv_head`` key/value heads shared by query heads (1 is MQA)."""

    name: ClassVar[str] = "grouped"

    n_kv_head: int = kconfig_field("N_KV_HEAD")

    def weights(self, shape: ModelShape) -> int:
        """Return C² for queries plus C × n_kv_head·H each for keys and values."""
        return shape.n_embd * (shape.n_embd + 2 * self.n_kv_head * shape.head_dim)

    def num_params(self, shape: ModelShape) -> int:
        """Return the weights plus one bias per column if enabled."""
        columns = shape.n_embd + 2 * self.n_kv_head * shape.head_dim
        return self.weights(shape) + (columns if shape.bias else 0)

    def flops_per_token(self, shape: ModelShape) -> int:
        """Return two FLOPs (multiply and add) per weight."""
        return 2 * self.weights(shape)

    def cached_numbers(self, shape: ModelShape) -> int:
        """Return 2·n_kv_head·H."""
        return 2 * self.n_kv_head * shape.head_dim

    def query_numbers(self, shape: ModelShape) -> int:
        """Return C."""
        return shape.n_embd


# Options of the latent projection, after multi-head latent attention (arXiv 2405.04434).
#
# c_k = x W_dk and c_v = x W_dv have width R and are shared by the heads; per head k_h = c_k K_h and
# v_h = c_v U_h. Neither positions nor biases are used.


@dataclass(frozen=True)
class LatentOptions:
    """Options of the latent projection; ``latent_dim`` 0 selects C/6 rounded to a multiple of 8."""

    name: ClassVar[str] = "latent"

    latent_dim: int = kconfig_field("LATENT_DIM")
    # One K and one U for all heads instead of one each.
    shared_expansion: bool = kconfig_field("LATENT_SHARED_EXPANSION")

    def width(self, shape: ModelShape) -> int:
        """Return R, with 0 resolved."""
        return self.latent_dim or nearest_multiple(shape.n_embd / 6, 8)

    def weights(self, shape: ModelShape) -> int:
        """Return C² + 2CR down + 2·N·R·H = 2CR up (2RH if the heads share K and U)."""
        heads = 1 if self.shared_expansion else shape.n_head
        down = 2 * shape.n_embd * self.width(shape)
        up = 2 * heads * self.width(shape) * shape.head_dim
        return shape.n_embd**2 + down + up

    def num_params(self, shape: ModelShape) -> int:
        """Return the weights: the latent projection has no bias."""
        return self.weights(shape)

    def flops_per_token(self, shape: ModelShape) -> int:
        """Return two FLOPs per weight; a shared expansion is applied once."""
        return 2 * self.weights(shape)

    def cached_numbers(self, shape: ModelShape) -> int:
        """Return 2R: c_k and c_v, shared by the heads."""
        return 2 * self.width(shape)

    def query_numbers(self, shape: ModelShape) -> int:
        """Return N·R: the absorbed queries q_h K_hᵀ have width R."""
        return shape.n_head * self.width(shape)


# Options of the full causal pattern.


@dataclass(frozen=True)
class FullOptions(PatternOptions):
    """Options of the full causal pattern: token i sees j ≤ i."""

    name: ClassVar[str] = "full"

    def mean_keys(self, length: int) -> float:
        """Return (T + 1) / 2."""
        return (length + 1) / 2

    def cached_tokens(self, length: int) -> int:
        """Return ``length``: every token is cached."""
        return length


# Options of the sliding-window pattern.


@dataclass(frozen=True)
class SlidingOptions(PatternOptions):
    """Options of the sliding-window pattern: ``window`` visible tokens, including the last."""

    name: ClassVar[str] = "sliding"

    window: int = kconfig_field("SLIDING_WINDOW")

    def mean_keys(self, length: int) -> float:
        """Return the mean of min(i + 1, w) over the rows."""
        window = min(self.window, length)
        return (window * (window + 1) / 2 + (length - window) * window) / length

    def cached_tokens(self, length: int) -> int:
        """Return at most w − 1: the next token fills the last place of the window."""
        return min(length, self.window - 1)
