"""Options of magnitude pruning."""

from dataclasses import dataclass
from typing import ClassVar

from lib.pruning.options import RampOptions


@dataclass(frozen=True)
class MagnitudeOptions(RampOptions):
    """Score |w|, with nothing to choose beyond what all pruners share."""

    name: ClassVar[str] = "magnitude"
