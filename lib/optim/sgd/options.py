"""Options of SGD."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol
from lib.errors import Problem
from lib.optim.options import OptimizerOptions


@dataclass(frozen=True)
class SgdOptions(OptimizerOptions):
    """Options of SGD with momentum (Sutskever et al. 2013).

    The momentum has torch's form: the learning rate is not part of the buffer.
    """

    name: ClassVar[str] = "sgd"

    momentum: float = symbol("SGD_MOMENTUM", low=0.0, high=1.0)
    dampening: float = symbol("SGD_DAMPENING", low=0.0, high=1.0)
    nesterov: bool = symbol("SGD_NESTEROV")

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        kind = "Nesterov momentum" if self.nesterov else "momentum"
        return f"{self.name}, {kind} {self.momentum:g}, weight decay {self.weight_decay:g}"

    def _problems(self) -> list[Problem]:
        problems = super()._problems()
        if self.momentum >= 1.0:
            what = f"SGD_MOMENTUM: must be < 1, got {self.momentum:g}"
            problems.append(Problem(what, code="config.out-of-range"))
        if self.nesterov and (self.momentum == 0.0 or self.dampening > 0.0):
            problems.append(
                Problem(
                    "SGD_NESTEROV: requires SGD_MOMENTUM > 0 and SGD_DAMPENING=0, got "
                    f"{self.momentum:g} and {self.dampening:g}",
                    code="config.conflict",
                )
            )
        return problems
