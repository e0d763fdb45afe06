"""Options of SGD."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import Problem
from lib.optim.options import OptimizerOptions


@dataclass(frozen=True)
class SgdOptions(OptimizerOptions):
    """Momentum as in Sutskever et al. (2013), in torch's form: the rate is outside of it."""

    name: ClassVar[str] = "sgd"

    momentum: float = symbol("SGD_MOMENTUM", low=0.0, high=1.0)
    dampening: float = symbol("SGD_DAMPENING", low=0.0, high=1.0)
    nesterov: bool = symbol("SGD_NESTEROV")

    @property
    def summary(self) -> str:
        """One line for a plan."""
        kind = "Nesterov momentum" if self.nesterov else "momentum"
        return f"{self.name}, {kind} {self.momentum:g}, weight decay {self.weight_decay:g}"

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        if self.momentum >= 1.0:
            problems.append(
                Problem(
                    f"SGD_MOMENTUM: {self.momentum:g} never forgets a gradient; "
                    "it must be below 1"
                )
            )
        if self.nesterov and (self.momentum == 0.0 or self.dampening > 0.0):
            problems.append(
                Problem(
                    "SGD_NESTEROV: needs SGD_MOMENTUM above 0 and SGD_DAMPENING=0, not "
                    f"{self.momentum:g} and {self.dampening:g}"
                )
            )
        return problems
