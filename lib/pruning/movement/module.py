"""Movement pruning (Sanh et al. 2020, arXiv 2005.07683): S ← S − g w at every optimizer step.

g is the gradient of the loss, ∂L/∂w as the paper has it, before clipping scales it, and w the weight
that it was taken at. A weight whose loss falls when it grows away from zero scores high.
"""

from typing import Any

import torch
from torch import nn

from lib.pruning.mask import MaskPruner
from lib.pruning.movement.options import MovementOptions


class MovementPruner(MaskPruner):
    """Keeps the weights that moved away from zero; one float32 more for each prunable weight."""

    def __init__(self, model: nn.Module, options: MovementOptions) -> None:
        super().__init__(model, options)
        self._scores = {
            name: torch.zeros_like(p, dtype=torch.float32) for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def observe(self, gradient_norm: torch.Tensor) -> None:
        """Add this step's −g w; a step that is going to be skipped counts for nothing."""
        skipped = ~torch.isfinite(gradient_norm)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                pull = parameter.grad.float() * parameter
                self._scores[name].sub_(pull.masked_fill_(skipped, 0.0))

    def score(self, name: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """−Σ g w over all steps so far, float32."""
        return self._scores[name].clone()

    def state_dict(self) -> dict[str, Any]:
        """The masks, and the sums."""
        return super().state_dict() | {"scores": dict(self._scores)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``. KeyError if it is another pruner's."""
        super().load_state_dict(state_dict)
        for name, scores in state_dict["scores"].items():
            self._scores[name].copy_(scores)
