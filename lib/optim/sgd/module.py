"""SGD by torch's foreach kernels."""

from collections.abc import Callable

import torch

from lib.optim.groups import ParameterGroup
from lib.optim.sgd.options import SgdOptions


class Sgd(torch.optim.SGD):
    """torch's SGD with the options of the configuration.

    Not fused: torch's fused kernel leaves momentum uninitialised where a GradScaler skips the first
    step, and refuses a parameter whose first gradient comes later than those of its group.
    """

    def __init__(self, groups: list[ParameterGroup], options: SgdOptions, lr: float) -> None:
        super().__init__(
            groups,
            lr=lr,
            momentum=options.momentum,
            dampening=options.dampening,
            nesterov=options.nesterov,
            foreach=True,
        )

    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        gradient_norm: torch.Tensor | None = None,
    ) -> float | None:
        """One update. ``gradient_norm``, the norm before clipping, is of no use to SGD."""
        return super().step(closure)

    def statistics(self) -> dict[str, float]:
        """Numbers for a log line: SGD has none of its own."""
        return {}
