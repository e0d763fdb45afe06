"""Reference full causal pattern, pair by pair."""

from gpt2.attention.full.options import FullOptions


def sees(i: int, j: int, options: FullOptions) -> bool:
    """Return whether j ≤ i."""
    return j <= i
