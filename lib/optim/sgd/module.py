"""SGD with torch's foreach kernels."""

from collections.abc import Callable

import torch

from lib.optim.groups import ParameterGroup
from lib.optim.sgd.options import SgdOptions


class Sgd(torch.optim.SGD):
    """torch's SGD with the configured options.

    Not fused: torch's fused kernel leaves the momentum uninitialized if a GradScaler skips the
    first step, and fails if a parameter gets its first gradient later than the others of its group.
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
        """Update the parameters. SGD ignores ``gradient_norm``, the norm before clipping."""
        return super().step(closure)

    def statistics(self) -> dict[str, float]:
        """Return no metrics: SGD logs none."""
        return {}
