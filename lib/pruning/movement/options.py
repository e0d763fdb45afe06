"""Options of movement pruning."""

from dataclasses import dataclass
from typing import ClassVar

from lib.pruning.options import RampOptions


@dataclass(frozen=True)
class MovementOptions(RampOptions):
    """Options of movement pruning (score −Σ g w): the common options only."""

    name: ClassVar[str] = "movement"
