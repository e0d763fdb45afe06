"""Options of the sliding-window pattern."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.options import PatternOptions
from lib.binding import symbol


@dataclass(frozen=True)
class SlidingOptions(PatternOptions):
    """Options of the sliding-window pattern: ``window`` visible tokens, including the last."""

    name: ClassVar[str] = "sliding"

    window: int = symbol("SLIDING_WINDOW")

    def mean_keys(self, length: int) -> float:
        """Return the mean of min(i + 1, w) over the rows."""
        window = min(self.window, length)
        return (window * (window + 1) / 2 + (length - window) * window) / length

    def cached_tokens(self, length: int) -> int:
        """Return at most w − 1: the next token fills the last place of the window."""
        return min(length, self.window - 1)
