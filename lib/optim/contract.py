"""Interface of every optimizer, as used by the trainer."""

from typing import Any, Protocol

import torch


class Optimizer(Protocol):
    """torch's optimizer interface with two additions.

    The trainer sets ``param_groups[...]["lr"]`` before each step.
    """

    param_groups: list[dict[str, Any]]

    def step(self, *, gradient_norm: torch.Tensor | None = None) -> Any:
        """Update the parameters from their ``.grad``, which may be modified.

        ``gradient_norm`` is the global gradient norm before clipping (the return value of
        ``clip_grad_norm_``); without it, an optimizer that needs the norm computes it from
        ``.grad``.
        """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""

    def statistics(self) -> dict[str, float]:
        """Return metrics for a log line. May wait for the device, so call only when logging."""

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors and plain numbers needed for an exact resume."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
