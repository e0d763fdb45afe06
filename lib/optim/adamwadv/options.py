"""Options of AdamW with AMSGrad."""

from dataclasses import dataclass
from typing import ClassVar

from lib.optim.adamw.options import AdamwOptions


@dataclass(frozen=True)
class AdamwadvOptions(AdamwOptions):
    """AdamW whose second moment never shrinks (Reddi et al. 2018, arXiv 1904.09237)."""

    name: ClassVar[str] = "adamwadv"
    amsgrad: ClassVar[bool] = True
