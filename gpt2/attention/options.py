"""What attention is made of, as the configuration says; imports no torch.

Every part's options declare what the part costs, so that a plan can be printed and a built model
checked against it. All FLOPs are of a forward pass, multiply and add counted as two.
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
    """How queries, keys and values come from the residual stream (output projection excluded)."""

    name: str

    def weights(self, shape: Shape) -> int:
        """Parameters of one block without biases."""

    def num_params(self, shape: Shape) -> int:
        """Parameters of one block with biases."""

    def flops_per_token(self, shape: Shape) -> int:
        """Forward FLOPs for one token of one block, scores excluded."""

    def cached_numbers(self, shape: Shape) -> int:
        """Keys and values that decoding keeps of one token in one block."""

    def query_numbers(self, shape: Shape) -> int:
        """One token's queries, as decoding multiplies them with those keys."""


@dataclass(frozen=True)
class Note:
    """Something to know before a run is started."""

    text: str
    warns: bool = False

    @property
    def tag(self) -> str:
        """What the line begins with."""
        return "WARN" if self.warns else "NOTE"


class PatternOptions(ABC):
    """Which earlier tokens a token sees. As it stands, a pattern has no parameters."""

    name: ClassVar[str]
    # Its module is an ``OwnAttention``, which attends in the place of SDPA and the row engine.
    attends: ClassVar[bool] = False

    @abstractmethod
    def mean_keys(self, length: int) -> float:
        """Keys that a query is multiplied with, averaged over a sequence of ``length`` tokens."""

    @abstractmethod
    def cached_tokens(self, length: int) -> int:
        """Of ``length`` tokens those whose keys and values decoding keeps for the next one."""

    def unrotated_tokens(self, length: int) -> int:
        """Of ``length`` tokens those whose keys decoding keeps as they were made, beside rotated ones."""
        return 0

    def check(self, shape: Shape) -> None:
        """ConfigError where the pattern does not fit the shape."""

    def notes(self, shape: Shape) -> list[Note]:
        """What whoever plans a run has to know of the pattern at this context."""
        return []

    def weights(self, shape: Shape, projection: ProjectionOptions) -> int:
        """Its own parameters in one block without biases: matrices only."""
        return 0

    def num_params(self, shape: Shape, projection: ProjectionOptions) -> int:
        """Its own parameters in one block."""
        return 0

    def flops_per_token(self, shape: Shape, projection: ProjectionOptions) -> float:
        """Forward FLOPs of these for one token of one block."""
        return 0.0

    def cached_numbers(self, shape: Shape, projection: ProjectionOptions, length: int) -> int:
        """What decoding keeps of ``length`` tokens beside the projection's keys and values."""
        return 0


class ScorePartOptions(Protocol):
    """A score term or a gate: its parameters and what it adds to the cost of attention."""

    name: str

    def num_params(self, shape: Shape) -> int:
        """Parameters of one block."""

    def flops_per_token(self, shape: Shape, keys: float) -> float:
        """Forward FLOPs added for one token of one block that sees ``keys`` keys."""

    @property
    def lacks_joined(self) -> str:
        """What of the part only the row engine computes; empty where nothing."""


class TermOptions(ScorePartOptions, Protocol):
    """A score term."""

    @property
    def reach(self) -> int:
        """How many earlier tokens' queries a row's scores depend on; 0 where it is only its own."""


@dataclass(frozen=True)
class AttentionConfig:
    """One projection, one pattern, one kind of positions, any terms, any gates."""

    projection: ProjectionOptions
    pattern: PatternOptions
    positions: PositionOptions
    terms: tuple[TermOptions, ...]
    gates: tuple[ScorePartOptions, ...]
    # auto, rows, joined, or a kernel of plain attention (see forms.py); empty where the pattern
    # attends by itself.
    backend: str = symbol("ATTENTION_BACKEND", form=True)

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> "AttentionConfig":
        """Select and fill the parts. ConfigError on a bad symbol."""
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
        """How many queries decoding keeps."""
        return max((term.reach for term in self.terms), default=0)

    def cached_numbers(self, shape: Shape, length: int) -> int:
        """What decoding keeps of ``length`` tokens in one block's attention."""
        tokens = self.pattern.cached_tokens(length)
        queries = min(tokens, self.reach) * self.projection.query_numbers(shape)
        own = self.pattern.cached_numbers(shape, self.projection, length)
        pair = self.projection.cached_numbers(shape)
        if self.positions.rotates:
            own += self.pattern.unrotated_tokens(length) * pair // 2
        return tokens * pair + queries + own

    def weights(self, shape: Shape) -> int:
        """Parameters of one block without biases, the base of the MLP ratio: matrices only."""
        own = self.pattern.weights(shape, self.projection)
        return self.projection.weights(shape) + shape.n_embd**2 + own

    def num_params(self, shape: Shape) -> int:
        """Parameters of one block: projection, output projection ``c_proj``, pattern and parts."""
        c_proj = shape.n_embd**2 + (shape.n_embd if shape.bias else 0)
        parts = sum(part.num_params(shape) for part in (*self.terms, *self.gates))
        own = self.pattern.num_params(shape, self.projection)
        return self.projection.num_params(shape) + c_proj + own + parts

    def flops_per_token(self, shape: Shape) -> float:
        """Forward FLOPs for one token of one block: projections, scores, aggregation, parts."""
        keys = self.pattern.mean_keys(shape.block_size)
        scores_and_values = 4 * shape.n_embd * keys
        parts = sum(part.flops_per_token(shape, keys) for part in (*self.terms, *self.gates))
        projections = self.projection.flops_per_token(shape) + 2 * shape.n_embd**2
        own = self.pattern.flops_per_token(shape, self.projection)
        return projections + scores_and_values + own + parts
