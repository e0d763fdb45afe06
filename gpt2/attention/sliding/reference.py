"""Reference sliding window, pair by pair."""

from gpt2.attention.sliding.options import SlidingOptions


def sees(i: int, j: int, options: SlidingOptions) -> bool:
    """Return whether max(0, i − w + 1) ≤ j ≤ i."""
    return max(0, i - options.window + 1) <= j <= i
