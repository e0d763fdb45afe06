"""One combination of a design, before anybody has asked whether it can be configured."""

from collections.abc import Mapping
from dataclasses import dataclass

from lib.binding import Value


@dataclass(frozen=True)
class Level:
    """One value of one factor: what it is called, and what it sets."""

    factor: str
    text: str
    slug: str
    delta: Mapping[str, Value]


@dataclass(frozen=True)
class Cell:
    """One level of every factor. ``parent`` is the slug of the cell that it is to be compared with;
    "" is a baseline."""

    slug: str
    levels: tuple[Level, ...]
    parent: str = ""

    @property
    def delta(self) -> dict[str, Value]:
        """The settings of all levels together."""
        return {name: value for level in self.levels for name, value in level.delta.items()}

    @property
    def texts(self) -> dict[str, str]:
        """Factor → level."""
        return {level.factor: level.text for level in self.levels}
