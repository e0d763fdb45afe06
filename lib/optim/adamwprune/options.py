"""Options of AdamWPrune: those of its base. What is pruned, and when, are the pruner's options."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import part
from lib.optim import BASES
from lib.optim.adam.options import AdamFamilyOptions


@dataclass(frozen=True)
class AdamwpruneOptions:
    """``base`` holds the options of the optimizer that trains."""

    name: ClassVar[str] = "adamwprune"

    base: AdamFamilyOptions = part(BASES)

    @property
    def weight_decay(self) -> float:
        """The base's, for the parameter groups."""
        return self.base.weight_decay

    @property
    def summary(self) -> str:
        """One line for a plan."""
        return f"{self.name} on {self.base.summary}"
