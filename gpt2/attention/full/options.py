"""Options of the full causal pattern."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.options import PatternOptions


@dataclass(frozen=True)
class FullOptions(PatternOptions):
    """Token i sees j ≤ i."""

    name: ClassVar[str] = "full"

    def mean_keys(self, length: int) -> float:
        """(T + 1) / 2."""
        return (length + 1) / 2

    def cached_tokens(self, length: int) -> int:
        """All."""
        return length
