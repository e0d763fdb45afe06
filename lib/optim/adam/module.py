"""Adam and its relatives by torch's fused kernel."""

from collections.abc import Callable

import torch

from lib.optim.adam.options import AdamFamilyOptions
from lib.optim.groups import ParameterGroup


class Adam(torch.optim.Adam):
    """torch's Adam with the options of the configuration, which make it AdamW and AMSGrad too.

    ``fused`` is one pass over memory on CPUs and GPUs alike (on a CPU five times as fast as the plain
    loop, and like it elementwise, so deterministic). torch raises where a device has no fused
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
        """One update. ``gradient_norm``, the norm before clipping, is of no use to Adam."""
        return super().step(closure)

    def statistics(self) -> dict[str, float]:
        """Numbers for a log line: Adam has none of its own."""
        return {}
