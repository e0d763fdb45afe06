"""Options of AdamWPrune: its base optimizer. The pruner's options define the pruning."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import part
from lib.optim import BASES
from lib.optim.adam.options import AdamFamilyOptions


@dataclass(frozen=True)
class AdamwpruneOptions:
    """Options of AdamWPrune; ``base`` contains the options of the optimizer that trains."""

    name: ClassVar[str] = "adamwprune"

    base: AdamFamilyOptions = part(BASES)

    @property
    def weight_decay(self) -> float:
        """Return the base's weight decay, for the parameter groups."""
        return self.base.weight_decay

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        return f"{self.name} on {self.base.summary}"
