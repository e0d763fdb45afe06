"""Options of magnitude pruning."""

from dataclasses import dataclass
from typing import ClassVar

from lib.pruning.options import RampOptions


@dataclass(frozen=True)
class MagnitudeOptions(RampOptions):
    """Options of magnitude pruning (score |w|): the common options only."""

    name: ClassVar[str] = "magnitude"
