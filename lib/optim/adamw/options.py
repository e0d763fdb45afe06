"""Options of AdamW, and of every optimizer that is built on it."""

from dataclasses import dataclass
from typing import ClassVar

from lib.optim.adam.options import AdamFamilyOptions


@dataclass(frozen=True)
class AdamwOptions(AdamFamilyOptions):
    """Decoupled weight decay regularization (arXiv 1711.05101)."""

    name: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True
