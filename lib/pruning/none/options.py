"""Options of training without pruning (none)."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class NoneOptions:
    """Empty options of the pruner that prunes nothing."""

    name: ClassVar[str] = "none"
    stretch: ClassVar[float] = 1.0

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        return self.name
