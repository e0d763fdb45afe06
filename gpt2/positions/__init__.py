"""Position encodings: learned position embeddings, or rotary queries and keys."""

from lib.registry import Registry

POSITIONS = Registry(
    "kind of positions",
    choice="POSITIONS",
    parts={"learned": "gpt2.positions.learned", "rope": "gpt2.positions.rope"},
)
