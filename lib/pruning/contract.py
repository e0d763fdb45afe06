"""Interface of every pruner, as used by the trainer."""

from typing import Any, Protocol

import torch


class Pruner(Protocol):
    """Interface of a pruner.

    In each optimizer step, the trainer runs backward, calls ``mask_gradients`` and ``observe``,
    clips the gradients, steps the optimizer and calls ``after_step``. Gradients are those of the
    global batch: accumulated, and averaged over processes.
    """

    def mask_gradients(self) -> None:
        """Zero the gradients of pruned weights, so that they affect no norm and no moment."""

    def observe(self, gradient_norm: torch.Tensor) -> None:
        """Collect score statistics from unclipped gradients and the weights before the update.

        ``gradient_norm`` is non-finite if the step is about to be skipped (fp16 overflow).
        """

    def after_step(self, step: int, progress: float, optimizer: torch.optim.Optimizer) -> None:
        """Prune if due, and set pruned weights to zero.

        ``step`` counts completed optimizer steps (1 after the first), ``progress`` is the fraction
        of the budget used, this step included.
        """

    def sparsity(self) -> float:
        """Return the measured fraction of prunable weights that are zero; waits for the device."""

    def sparsity_by_layer(self) -> dict[str, float]:
        """Return the measured sparsity of each prunable parameter by name."""

    def prunable_weights(self) -> dict[str, int]:
        """Return the number of prunable weights of each prunable parameter by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors and plain numbers needed for an exact resume."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
