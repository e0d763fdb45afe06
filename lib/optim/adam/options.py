"""Options of Adam and of the optimizers derived from Adam."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import Problem
from lib.optim.options import OptimizerOptions


@dataclass(frozen=True)
class AdamFamilyOptions(OptimizerOptions):
    """Options common to Adam and its variants."""

    # Decoupled weight decay (arXiv 1711.05101) instead of L2 regularization of the gradient.
    decoupled: ClassVar[bool]
    # Divide by the running maximum of the second moment (arXiv 1904.09237).
    amsgrad: ClassVar[bool] = False

    beta1: float = symbol("ADAM_BETA1", low=0.0, high=1.0)
    beta2: float = symbol("ADAM_BETA2", low=0.0, high=1.0)
    eps: float = symbol("ADAM_EPS", low=0.0, high=1.0)

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        betas = f"betas {self.beta1:g} {self.beta2:g}"
        return f"{self.name}, {betas}, weight decay {self.weight_decay:g}"

    def _problems(self) -> list[Problem]:
        betas = {"ADAM_BETA1": self.beta1, "ADAM_BETA2": self.beta2}
        return super()._problems() + [
            Problem(f"{name}: must be < 1, got {beta:g}", code="config.out-of-range")
            for name, beta in betas.items()
            if beta >= 1.0
        ]


@dataclass(frozen=True)
class AdamOptions(AdamFamilyOptions):
    """Options of Adam (arXiv 1412.6980)."""

    name: ClassVar[str] = "adam"
    decoupled: ClassVar[bool] = False

    amsgrad: bool = symbol("ADAM_AMSGRAD")
