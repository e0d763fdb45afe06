"""Options of the sliding-window pattern."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.options import PatternOptions
from lib.binding import symbol


@dataclass(frozen=True)
class SlidingOptions(PatternOptions):
    """Token i sees max(0, i − w + 1) ≤ j ≤ i: ``window`` tokens, itself included."""

    name: ClassVar[str] = "sliding"

    window: int = symbol("SLIDING_WINDOW")

    def mean_keys(self, length: int) -> float:
        """Rows shorter than the window see i + 1 keys, the rest the whole window."""
        window = min(self.window, length)
        return (window * (window + 1) / 2 + (length - window) * window) / length

    def cached_tokens(self, length: int) -> int:
        """The last w − 1: the next token is the window's last."""
        return min(length, self.window - 1)
