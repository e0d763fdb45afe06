"""Options of magnitude pruning."""

from dataclasses import dataclass
from typing import ClassVar

from lib.pruning.options import PruningOptions


@dataclass(frozen=True)
class MagnitudeOptions(PruningOptions):
    """Score |w|, with nothing to choose beyond what all pruners share."""

    name: ClassVar[str] = "magnitude"
