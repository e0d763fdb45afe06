"""Adam, AdamW and AMSGrad with torch's fused kernel."""

from collections.abc import Callable

import torch

from lib.optim.adam.options import AdamFamilyOptions
from lib.optim.groups import ParameterGroup


class Adam(torch.optim.Adam):
    """torch's Adam, configured as Adam, AdamW or AMSGrad by its options.

    ``fused`` makes one pass over memory on CPUs and GPUs (on a CPU five times as fast as the plain
    loop, and elementwise, so deterministic). torch raises RuntimeError if a device has no fused
    kernel.
    """

    def __init__(self, groups: list[ParameterGroup], options: AdamFamilyOptions, lr: float) -> None:
        super().__init__(
            groups,
            lr=lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            amsgrad=options.amsgrad,
            fused=True,
            decoupled_weight_decay=options.decoupled,
        )

    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        gradient_norm: torch.Tensor | None = None,
    ) -> float | None:
        """Update the parameters. Adam ignores ``gradient_norm``, the norm before clipping."""
        return super().step(closure)

    def statistics(self) -> dict[str, float]:
        """Return no metrics: Adam logs none."""
        return {}
