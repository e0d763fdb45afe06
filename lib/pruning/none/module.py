"""The pruner that prunes nothing, so that the trainer need not ask whether there is one."""

from typing import Any

from torch import nn

from lib.pruning.none.options import NoneOptions


class NonePruner:
    """Keeps ``lib.pruning.contract.Pruner`` without doing anything."""

    def __init__(self, model: nn.Module, options: NoneOptions) -> None:
        pass

    def mask_gradients(self) -> None:
        """Every gradient counts."""

    def observe(self, gradient_norm: Any) -> None:
        """Nothing is scored."""

    def after_step(self, step: int, progress: float, optimizer: Any) -> None:
        """Every weight stays."""

    def sparsity(self) -> float:
        """0: nothing is prunable."""
        return 0.0

    def sparsity_by_layer(self) -> dict[str, float]:
        """Empty: nothing is prunable."""
        return {}

    def prunable_weights(self) -> dict[str, int]:
        """Empty: nothing is prunable."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Empty: there is nothing to continue."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the empty state."""
        assert not state_dict, "a pruner's state was given to a run without pruning"
