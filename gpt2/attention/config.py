"""Configuration of attention: registered components, their composition, selection of the backend.

Imports no torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gpt2.attention.options import (
    ConfigNote,
    DenseOptions,
    FullOptions,
    GateOptions,
    GroupedOptions,
    LatentOptions,
    LearnedOptions,
    PatternOptions,
    PositionOptions,
    ProjectionOptions,
    RopeOptions,
    SlidingOptions,
    TermOptions,
)
from gpt2.attention.ra_cross_token.options import RaCrossTokenOptions
from gpt2.attention.reciprocal.options import ReciprocalOptions
from gpt2.nsa.options import NsaOptions
from gpt2.shape import ModelShape
from lib.config.field import SymbolValue, kconfig_field
from lib.config.registry import Registry
from lib.config.small_form import SmallForm
from lib.errors import ConfigError, Problem

# Maximum head dim of the Triton kernels: wider tiles exceed the registers.
MAX_TILE_HEAD_DIM = 128
# Minimum compute capability, major number, of the Triton kernels on NVIDIA's GPUs.
MIN_TILE_CAPABILITY = 8

PROJECTIONS: Registry[ProjectionOptions] = Registry(
    "attention projection",
    DenseOptions,
    GroupedOptions,
    LatentOptions,
    choice="ATTENTION_PROJECTION",
)
PATTERNS: Registry[PatternOptions] = Registry(
    "attention pattern", FullOptions, SlidingOptions, NsaOptions, choice="ATTENTION_PATTERN"
)
POSITIONS: Registry[PositionOptions] = Registry(
    "kind of positions", LearnedOptions, RopeOptions, choice="POSITIONS"
)
TERMS: Registry[TermOptions] = Registry("score term", ReciprocalOptions)
GATES: Registry[GateOptions] = Registry("attention gate", RaCrossTokenOptions)


def _small_backend(form: SmallForm, name: str) -> str:
    """Return the math kernel or rows for kernels that a CPU lacks, or lacks with dropout."""
    if form.values[name] == "triton":
        return "rows"
    unsupported = ("efficient", "flash") if float(form.values["DROPOUT"]) else ("efficient",)
    return "math" if form.values[name] in unsupported else str(form.values[name])


@dataclass(frozen=True)
class AttentionConfig:
    """Attention configuration: projection, pattern, positions, any terms, any gates."""

    projection: ProjectionOptions
    pattern: PatternOptions
    positions: PositionOptions
    terms: tuple[TermOptions, ...]
    gates: tuple[GateOptions, ...]
    # auto, rows, triton, or an SDPA kernel (see kernels.py); empty if the pattern has its own kernel.
    backend: str = kconfig_field("ATTENTION_BACKEND", form=True, small=_small_backend)

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


def select_backend(
    attention: AttentionConfig,
    shape: ModelShape,
    shows_weights: bool,
    device: str,
    tiles: bool = True,
) -> str:
    """Return the backend for attention on ``device`` ("cpu" or "cuda").

    One of sdpa, rows, triton, or own if the pattern has its own kernel. ``shows_weights`` is true
    if an MLP reads attention weights; ``tiles`` is true if the GPU can run the Triton kernels.
    Raises ConfigError if the Triton kernels are configured but do not support the GPU or the
    configured components.
    """
    if attention.pattern.attends:
        return "own"
    lacks_triton = unsupported_by_triton(attention, shape)
    if device == "cuda" and not tiles:
        lacks_triton.append(f"GPUs below compute capability {MIN_TILE_CAPABILITY}.0")
    if attention.backend == "triton":
        if lacks_triton:
            raise ConfigError(
                Problem(
                    f"ATTENTION_BACKEND: triton does not support {', '.join(lacks_triton)}",
                    next="type: SET=ATTENTION_BACKEND_ROWS=y",
                    code="attention.backend-unsupported",
                )
            )
        return "triton"
    plain = not (attention.terms or attention.gates or shows_weights)
    if plain and attention.backend != "rows":
        return "sdpa"
    # One pass over tiles in place of a loop over chunks of rows.
    by_tiles = attention.backend == "auto" and device == "cuda" and not lacks_triton
    return "triton" if by_tiles else "rows"


def gpu_notes(
    attention: AttentionConfig, shape: ModelShape, shows_weights: Collection[bool]
) -> list[ConfigNote]:
    """Return a note if AUTO selects the Triton kernels, or a faster backend than rows exists.

    ``shows_weights`` contains true if an MLP reads attention weights, and false if one does not.
    """
    forms = {select_backend(attention, shape, shows, "cuda") for shows in shows_weights}
    if attention.backend == "auto" and "triton" in forms:
        compared = "they are compared with rows on the GPU before training"
        return [ConfigNote(f"attention by Triton kernels; {compared}")]
    if "rows" not in forms or unsupported_by_triton(attention, shape):
        return []
    # docs/gpu.md
    slow = "on an H100, a step took 3 to 6 times as long as the baseline"
    return [ConfigNote(f"attention by rows ({slow}); ATTENTION_BACKEND_TRITON=y avoids them")]


def unsupported_by_triton(attention: AttentionConfig, shape: ModelShape) -> list[str]:
    """Return the configured features that the Triton kernels do not support."""
    unsupported = [part.lacks_triton for part in (*attention.terms, *attention.gates)]
    # A pass has one band and one statistic.
    unsupported += ["several score terms"] * (len(attention.terms) > 1)
    unsupported += ["several gates"] * (len(attention.gates) > 1)
    if shape.head_dim > MAX_TILE_HEAD_DIM:
        unsupported.append(f"head dim {shape.head_dim} (maximum {MAX_TILE_HEAD_DIM})")
    return [feature for feature in unsupported if feature]
