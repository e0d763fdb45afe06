"""Options common to every optimizer; imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of an optimizer; the parameter groups apply the weight decay to matrices only."""

    name: ClassVar[str]

    weight_decay: float = symbol("WEIGHT_DECAY", low=0.0, high=100.0)

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError(*problems)

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        return f"{self.name}, weight decay {self.weight_decay:g}"

    def _problems(self) -> list[Problem]:
        """Return all violated rules; a subclass with more rules extends the list."""
        return []
