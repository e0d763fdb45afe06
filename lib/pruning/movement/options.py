"""Options of movement pruning."""

from dataclasses import dataclass
from typing import ClassVar

from lib.pruning.options import RampOptions


@dataclass(frozen=True)
class MovementOptions(RampOptions):
    """Score −Σ g w, with nothing to choose beyond what most pruners share."""

    name: ClassVar[str] = "movement"
