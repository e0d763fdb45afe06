"""Pruner that prunes nothing, so that the trainer needs no special case."""

from typing import Any

from torch import nn

from lib.pruning.none.options import NoneOptions


class NonePruner:
    """No-op implementation of ``lib.pruning.contract.Pruner``."""

    def __init__(self, model: nn.Module, options: NoneOptions) -> None:
        pass

    def mask_gradients(self) -> None:
        """Leave every gradient unchanged."""

    def observe(self, gradient_norm: Any) -> None:
        """Do nothing: there are no scores."""

    def after_step(self, step: int, progress: float, optimizer: Any) -> None:
        """Leave every weight unchanged."""

    def sparsity(self) -> float:
        """Return 0: nothing is prunable."""
        return 0.0

    def sparsity_by_layer(self) -> dict[str, float]:
        """Return an empty mapping: nothing is prunable."""
        return {}

    def prunable_weights(self) -> dict[str, int]:
        """Return an empty mapping: nothing is prunable."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept the empty state."""
        assert not state_dict, "pruner state loaded into a run without pruning"
