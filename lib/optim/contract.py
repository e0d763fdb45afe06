"""What the trainer may ask of any optimizer."""

from typing import Any, Protocol

import torch


class Optimizer(Protocol):
    """torch's optimizer interface, and two additions.

    ``param_groups[...]["lr"]`` is set by the trainer before each step.
    """

    param_groups: list[dict[str, Any]]

    def step(self, *, gradient_norm: torch.Tensor | None = None) -> Any:
        """One update from the ``.grad`` of the parameters, which it may change.

        ``gradient_norm`` is their norm over all parameters before clipping (what
        ``clip_grad_norm_`` returns); without it an optimizer that needs it measures ``.grad``.
        """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""

    def statistics(self) -> dict[str, float]:
        """Numbers for a log line; may wait for the device, so ask only when logging."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers, all that an uninterrupted continuation needs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
