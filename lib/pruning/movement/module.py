"""Movement pruning (Sanh et al. 2020, arXiv 2005.07683): S ← S − g w at every optimizer step.

g is the unclipped gradient of the loss, ∂L/∂w as in the paper, and w is the weight before the
update. A weight has a high score if the loss decreases as the weight grows away from zero.
"""

from typing import Any

import torch
from torch import nn

from lib.pruning.mask import MaskPruner
from lib.pruning.movement.options import MovementOptions


class MovementPruner(MaskPruner):
    """Pruner that retains weights that moved away from zero; one extra float32 per weight."""

    def __init__(self, model: nn.Module, options: MovementOptions) -> None:
        super().__init__(model, options)
        self._scores = {
            name: torch.zeros_like(p, dtype=torch.float32) for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def observe(self, gradient_norm: torch.Tensor) -> None:
        """Add this step's −g w to the scores; a step that will be skipped adds nothing."""
        skipped = ~torch.isfinite(gradient_norm)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                product = parameter.grad.float() * parameter
                self._scores[name].sub_(product.masked_fill_(skipped, 0.0))

    def score(self, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return −Σ g w over all steps so far as float32."""
        return self._scores[name].clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the masks and the accumulated scores."""
        return super().state_dict() | {"scores": dict(self._scores)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``. Raises KeyError if it belongs to another pruner."""
        super().load_state_dict(state_dict)
        for name, scores in state_dict["scores"].items():
            self._scores[name].copy_(scores)
