"""Options of attention and of its components; does not import torch.

Options declare the cost of a component, so that a plan can be printed and a built model can be
checked against it. FLOPs are forward FLOPs, with a multiply-add counted as two.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gpt2.attention import GATES, PATTERNS, PROJECTIONS, TERMS
from gpt2.positions import POSITIONS
from gpt2.positions.options import PositionOptions
from gpt2.shape import Shape
from lib.binding import Value, symbol


class ProjectionOptions(Protocol):
    """Options of the query, key and value projection (output projection excluded)."""

    name: str

    def weights(self, shape: Shape) -> int:
        """Return the parameters of one block without biases."""

    def num_params(self, shape: Shape) -> int:
        """Return the parameters of one block with biases."""

    def flops_per_token(self, shape: Shape) -> int:
        """Return the forward FLOPs per token and block, without attention scores."""

    def cached_numbers(self, shape: Shape) -> int:
        """Return the cached key and value elements per token and block."""

    def query_numbers(self, shape: Shape) -> int:
        """Return the query elements per token as used in decoding."""


@dataclass(frozen=True)
class Note:
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

    def check(self, shape: Shape) -> None:
        """Raise ConfigError if the pattern does not fit the shape."""

    def notes(self, shape: Shape) -> list[Note]:
        """Return notes and warnings about the pattern at this context length."""
        return []

    def weights(self, shape: Shape, projection: ProjectionOptions) -> int:
        """Return the pattern's matrix parameters of one block, without biases."""
        return 0

    def num_params(self, shape: Shape, projection: ProjectionOptions) -> int:
        """Return the pattern's parameters of one block."""
        return 0

    def flops_per_token(self, shape: Shape, projection: ProjectionOptions) -> float:
        """Return the forward FLOPs of the pattern's parameters per token and block."""
        return 0.0

    def cached_numbers(self, shape: Shape, projection: ProjectionOptions, length: int) -> int:
        """Return cached elements for ``length`` tokens besides the projection's keys and values."""
        return 0


class ScorePartOptions(Protocol):
    """Options of a score term or gate: parameters and added cost."""

    name: str

    def num_params(self, shape: Shape) -> int:
        """Return the parameters of one block."""

    def flops_per_token(self, shape: Shape, keys: float) -> float:
        """Return the added forward FLOPs per token and block with ``keys`` visible keys."""

    @property
    def lacks_joined(self) -> str:
        """Return the features that only the row engine supports ("" if none)."""


class TermOptions(ScorePartOptions, Protocol):
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
    gates: tuple[ScorePartOptions, ...]
    # auto, rows, joined, or an SDPA kernel (see forms.py); empty if the pattern has its own kernel.
    backend: str = symbol("ATTENTION_BACKEND", form=True)

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> "AttentionConfig":
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

    def cached_numbers(self, shape: Shape, length: int) -> int:
        """Return the cached elements for ``length`` tokens in the attention of one block."""
        tokens = self.pattern.cached_tokens(length)
        queries = min(tokens, self.reach) * self.projection.query_numbers(shape)
        extra = self.pattern.cached_numbers(shape, self.projection, length)
        pair = self.projection.cached_numbers(shape)
        if self.positions.rotates:
            extra += self.pattern.unrotated_tokens(length) * pair // 2
        return tokens * pair + queries + extra

    def weights(self, shape: Shape) -> int:
        """Return the matrix parameters of one block without biases, the base of the MLP ratio."""
        pattern = self.pattern.weights(shape, self.projection)
        return self.projection.weights(shape) + shape.n_embd**2 + pattern

    def num_params(self, shape: Shape) -> int:
        """Return the parameters of one block, including the output projection ``c_proj``."""
        c_proj = shape.n_embd**2 + (shape.n_embd if shape.bias else 0)
        parts = sum(part.num_params(shape) for part in (*self.terms, *self.gates))
        pattern = self.pattern.num_params(shape, self.projection)
        return self.projection.num_params(shape) + c_proj + pattern + parts

    def flops_per_token(self, shape: Shape) -> float:
        """Return the forward FLOPs per token and block, including scores and aggregation."""
        keys = self.pattern.mean_keys(shape.block_size)
        scores_and_values = 4 * shape.n_embd * keys
        parts = sum(part.flops_per_token(shape, keys) for part in (*self.terms, *self.gates))
        projections = self.projection.flops_per_token(shape) + 2 * shape.n_embd**2
        pattern = self.pattern.flops_per_token(shape, self.projection)
        return projections + scores_and_values + pattern + parts
