"""Attention, composed of one projection, one pattern, and any score terms and gates."""

from lib.config.registry import Registry

PROJECTIONS = Registry(
    "attention projection",
    choice="ATTENTION_PROJECTION",
    parts={
        "dense": (
            "gpt2.attention.options",
            "gpt2.attention.projections",
            "gpt2.attention.reference",
        ),
        "grouped": (
            "gpt2.attention.options",
            "gpt2.attention.projections",
            "gpt2.attention.reference",
        ),
        "latent": (
            "gpt2.attention.options",
            "gpt2.attention.projections",
            "gpt2.attention.reference",
        ),
    },
)
PATTERNS = Registry(
    "attention pattern",
    choice="ATTENTION_PATTERN",
    parts={
        "full": ("gpt2.attention.options", "gpt2.attention.patterns", "gpt2.attention.reference"),
        "sliding": (
            "gpt2.attention.options",
            "gpt2.attention.patterns",
            "gpt2.attention.reference",
        ),
        "nsa": ("gpt2.nsa.options", "gpt2.nsa.module", "gpt2.nsa.reference"),
    },
)
TERMS = Registry(
    "score term",
    parts={
        "reciprocal": (
            "gpt2.attention.reciprocal.options",
            "gpt2.attention.reciprocal.module",
            "gpt2.attention.reciprocal.reference",
        ),
    },
)
GATES = Registry(
    "attention gate",
    parts={
        "ra_cross_token": (
            "gpt2.attention.ra_cross_token.options",
            "gpt2.attention.ra_cross_token.module",
            "gpt2.attention.ra_cross_token.reference",
        )
    },
)


POSITIONS = Registry(
    "kind of positions",
    choice="POSITIONS",
    parts={
        "learned": (
            "gpt2.attention.options",
            "gpt2.attention.positions",
            "gpt2.attention.reference",
        ),
        "rope": ("gpt2.attention.options", "gpt2.attention.positions", "gpt2.attention.reference"),
    },
)
