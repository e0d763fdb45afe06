"""Options of the full causal pattern."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.options import PatternOptions


@dataclass(frozen=True)
class FullOptions(PatternOptions):
    """Options of the full causal pattern: token i sees j ≤ i."""

    name: ClassVar[str] = "full"

    def mean_keys(self, length: int) -> float:
        """Return (T + 1) / 2."""
        return (length + 1) / 2

    def cached_tokens(self, length: int) -> int:
        """Return ``length``: every token is cached."""
        return length
