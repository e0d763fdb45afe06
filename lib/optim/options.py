"""What every optimizer has to know; imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class OptimizerOptions:
    """The decay is given to the parameter groups, because only matrices decay."""

    name: ClassVar[str]

    weight_decay: float = symbol("WEIGHT_DECAY", low=0.0, high=100.0)

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError(*problems)

    @property
    def summary(self) -> str:
        """One line for a plan."""
        return f"{self.name}, weight decay {self.weight_decay:g}"

    def _problems(self) -> list[Problem]:
        """All broken rules; an optimizer that adds rules extends the list."""
        return []
