"""Cells of a design: combinations of factor levels, not yet resolved."""

from collections.abc import Mapping
from dataclasses import dataclass

from lib.binding import Value


@dataclass(frozen=True)
class Level:
    """One value of one factor: its name and its settings."""

    factor: str
    text: str
    slug: str
    delta: Mapping[str, Value]


@dataclass(frozen=True)
class Cell:
    """One level of every factor. ``parent`` is the comparison cell's slug, "" for a baseline."""

    slug: str
    levels: tuple[Level, ...]
    parent: str = ""

    @property
    def delta(self) -> dict[str, Value]:
        """Return the settings of all levels."""
        return {name: value for level in self.levels for name, value in level.delta.items()}

    @property
    def texts(self) -> dict[str, str]:
        """Return the level names by factor."""
        return {level.factor: level.text for level in self.levels}
