"""Configuration of attention: registered components and their composition. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt2.attention.options import (
    AttentionSinkOptions,
    DenseOptions,
    FullOptions,
    GateOptions,
    GroupedOptions,
    LatentOptions,
    LearnedOptions,
    PartOptions,
    PatternOptions,
    PositionOptions,
    ProjectionOptions,
    QkNormOptions,
    RaCrossTokenOptions,
    ReciprocalOptions,
    RopeOptions,
    SinkOptions,
    SlidingOptions,
    TermOptions,
    TransformOptions,
    ValueMixOptions,
    ValueResidualOptions,
)
from gpt2.nsa.options import NsaOptions
from gpt2.shape import Cost, ModelShape
from lib.config.field import SymbolValue, kconfig_field
from lib.config.registry import Registry
from lib.config.small_form import SmallForm

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
TRANSFORMS: Registry[TransformOptions] = Registry(
    "transformation of queries and keys", QkNormOptions
)
TERMS: Registry[TermOptions] = Registry("score term", ReciprocalOptions)
GATES: Registry[GateOptions] = Registry("attention gate", RaCrossTokenOptions)
SINKS: Registry[SinkOptions] = Registry("attention sink", AttentionSinkOptions)
VALUE_MIXES: Registry[ValueMixOptions] = Registry("mix of values", ValueResidualOptions)
REGISTRIES: tuple[Registry[Any], ...] = (
    *(PROJECTIONS, PATTERNS, POSITIONS, TRANSFORMS, TERMS, GATES, SINKS, VALUE_MIXES),
)


def _small_backend(form: SmallForm, name: str) -> str:
    if form.values[name] == "triton":
        return "rows"
    unsupported = ("efficient", "flash") if float(form.values["DROPOUT"]) else ("efficient",)
    return "math" if form.values[name] in unsupported else str(form.values[name])


@dataclass(frozen=True)
class AttentionConfig:
    """Attention configuration: projection, transformations, pattern, positions, terms, gates, sink,
    mix of values.
    """

    projection: ProjectionOptions
    pattern: PatternOptions
    positions: PositionOptions
    terms: tuple[TermOptions, ...]
    gates: tuple[GateOptions, ...]
    # auto, rows, triton, or an SDPA kernel (see backends.py); empty if the pattern has its own kernel.
    backend: str = kconfig_field("ATTENTION_BACKEND", form=True, small=_small_backend)
    transforms: tuple[TransformOptions, ...] = field(default=(), metadata={"off": ()})
    # One at most.
    sinks: tuple[SinkOptions, ...] = field(default=(), metadata={"off": ()})
    value_mixes: tuple[ValueMixOptions, ...] = field(default=(), metadata={"off": ()})

    @classmethod
    def from_values(cls, values: Mapping[str, SymbolValue]) -> "AttentionConfig":
        """Build the configured components. Raises ConfigError if a symbol is invalid."""
        (projection,) = PROJECTIONS.bind(values)
        (pattern,) = PATTERNS.bind(values)
        (positions,) = POSITIONS.bind(values)
        lists = TERMS.bind(values), GATES.bind(values)
        backend, transforms = str(values["ATTENTION_BACKEND"]), TRANSFORMS.bind(values)
        others = SINKS.bind(values), VALUE_MIXES.bind(values)
        return cls(projection, pattern, positions, *lists, backend, transforms, *others)

    @property
    def added(self) -> tuple[PartOptions, ...]:
        """Return the components that attention may have or not."""
        return *self.transforms, *self.terms, *self.gates, *self.sinks, *self.value_mixes

    def mixes(self, block: int) -> tuple[ValueMixOptions, ...]:
        """Return the mixes of a block with the values of the first one."""
        return self.value_mixes if block else ()

    def cost(self, shape: ModelShape, block: int) -> Cost:
        """Return the cost of a block, with scores, aggregation and the output projection.

        Its weights are the base of the MLP ratio.
        """
        keys = self.pattern.mean_keys(shape.block_size)
        c_proj = Cost(shape.n_embd**2, shape.n_embd * shape.bias, 4 * shape.n_embd * keys)
        values = self.projection.expanded_numbers(shape) // 2
        heads = shape.n_embd + values
        return Cost.of(
            (
                self.projection.cost(shape),
                c_proj,
                self.pattern.cost(shape, self.projection),
                *(part.cost(shape, keys) for part in (*self.terms, *self.gates)),
                *(part.cost(shape, heads) for part in self.transforms),
                *(part.cost(shape) for part in self.sinks),
                *(part.cost(shape, values) for part in self.mixes(block)),
            )
        )
