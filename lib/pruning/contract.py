"""What the trainer may ask of any pruner."""

from typing import Any, Protocol

import torch


class Pruner(Protocol):
    """Within an optimizer step: backward, ``mask_gradients``, ``observe``, clip, step, ``after_step``.

    Gradients are those of the global batch, after accumulation and the mean over processes.
    """

    def mask_gradients(self) -> None:
        """Zero the gradients of pruned weights, so that they count in no norm and no moment."""

    def observe(self, gradient_norm: torch.Tensor) -> None:
        """Take from gradients, not yet clipped, and weights, not yet moved, what scores need.

        ``gradient_norm`` is not finite where the step is going to be skipped: fp16 overflowed.
        """

    def after_step(self, step: int, progress: float, optimizer: torch.optim.Optimizer) -> None:
        """Prune if it is time, and keep pruned weights at zero.

        ``step`` counts the optimizer steps done (1 after the first), ``progress`` is the part of
        the budget used, this step included.
        """

    def sparsity(self) -> float:
        """Measured part of the prunable weights that is zero; waits for the device."""

    def sparsity_by_layer(self) -> dict[str, float]:
        """The same for each prunable parameter, by name."""

    def prunable_weights(self) -> dict[str, int]:
        """How many weights of each of them may be pruned, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers, all that an uninterrupted continuation needs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
