"""Options of AdamW and of the optimizers derived from AdamW."""

from dataclasses import dataclass
from typing import ClassVar

from lib.optim.adam.options import AdamFamilyOptions


@dataclass(frozen=True)
class AdamwOptions(AdamFamilyOptions):
    """Options of AdamW (decoupled weight decay regularization, arXiv 1711.05101)."""

    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True
