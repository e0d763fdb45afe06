"""Options of training without pruning: there are none."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class NoneOptions:
    """Nothing to choose."""

    name: ClassVar[str] = "none"
    stretch: ClassVar[float] = 1.0

    @property
    def summary(self) -> str:
        """One line for a plan."""
        return self.name
