"""The component of attention that each class of options describes."""

from collections.abc import Callable
from typing import Any

from gpt2.attention.chunk_parts import Pattern
from gpt2.attention.config import AttentionConfig
from gpt2.attention.options import (
    DenseOptions,
    FullOptions,
    GroupedOptions,
    LatentOptions,
    LearnedOptions,
    RopeOptions,
    SlidingOptions,
)
from gpt2.attention.patterns import CustomAttention, Full, Sliding
from gpt2.attention.positions import Learned, Rope
from gpt2.attention.projections import Dense, Grouped, Latent
from gpt2.attention.ra_cross_token.module import RaCrossToken
from gpt2.attention.ra_cross_token.options import RaCrossTokenOptions
from gpt2.attention.reciprocal.module import Reciprocal
from gpt2.attention.reciprocal.options import ReciprocalOptions
from gpt2.nsa.options import NsaOptions
from gpt2.shape import ModelShape


def _nsa(shape: ModelShape, options: AttentionConfig, block: int) -> CustomAttention:
    # Loaded by models with this pattern only.
    from gpt2.nsa.module import Nsa

    assert isinstance(options.pattern, NsaOptions)
    positions = build(shape, options.positions)
    return Nsa(shape, options.pattern, options.projection, positions, block)


# Projections, positions, score terms and gates are called with the shape and their options, patterns
# with the shape, the options of the attention and the index of the layer.
MODULES: dict[type[Any], Callable[..., Any]] = {
    DenseOptions: Dense,
    GroupedOptions: Grouped,
    LatentOptions: Latent,
    LearnedOptions: lambda shape, options: Learned(),
    RopeOptions: Rope,
    FullOptions: lambda shape, options, block: Full(),
    SlidingOptions: lambda shape, options, block: Sliding(options.pattern),
    NsaOptions: _nsa,
    ReciprocalOptions: Reciprocal,
    RaCrossTokenOptions: RaCrossToken,
}


def build(shape: ModelShape, options: Any) -> Any:
    """Return the projection, positions, score term or gate of one block."""
    return MODULES[type(options)](shape, options)


def build_pattern(
    shape: ModelShape, options: AttentionConfig, block: int
) -> Pattern | CustomAttention:
    """Return the pattern of block ``block``, with its own kernel if ``attends``."""
    pattern: Pattern | CustomAttention = MODULES[type(options.pattern)](shape, options, block)
    return pattern
