"""Options of AdamW with AMSGrad."""

from dataclasses import dataclass
from typing import ClassVar

from lib.optim.adamw.options import AdamwOptions


@dataclass(frozen=True)
class AdamwadvOptions(AdamwOptions):
    """Options of AdamW with a non-decreasing second moment (Reddi et al., arXiv 1904.09237)."""

    name: ClassVar[str] = "adamwadv"
    amsgrad: ClassVar[bool] = True
