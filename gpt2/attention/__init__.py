"""Attention, composed of one projection, one pattern, and any score terms and gates."""

from lib.registry import Registry

PROJECTIONS = Registry(
    "attention projection",
    choice="ATTENTION_PROJECTION",
    parts={
        "dense": "gpt2.attention.dense",
        "grouped": "gpt2.attention.grouped",
        "latent": "gpt2.attention.latent",
    },
)
PATTERNS = Registry(
    "attention pattern",
    choice="ATTENTION_PATTERN",
    parts={
        "full": "gpt2.attention.full",
        "sliding": "gpt2.attention.sliding",
        "nsa": "gpt2.attention.nsa",
    },
)
TERMS = Registry(
    "score term",
    parts={
        "reciprocal": "gpt2.attention.reciprocal",
    },
)
GATES = Registry("attention gate", parts={"ra_cross_token": "gpt2.attention.ra_cross_token"})
