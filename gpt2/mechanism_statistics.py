"""Statistics reported by mechanisms, such as attention entropy and gate openness.

Every submodule with a ``statistics`` method is called with the inputs of its forward pass, in a
separate pass over the model. This module does not depend on specific mechanisms.

B batch, T tokens, N heads, X elements.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

# ``<mechanism>/<statistic>`` → scalar. Layers are aggregated by mean, or by minimum or maximum if
# the name ends in _min or _max.
Statistics = Mapping[str, Tensor]
# One value per block; None if the block lacks the mechanism or the value is non-finite.
StatisticsByLayer = dict[str, list[float | None]]

# A gate counts as closed below the first threshold and as open above the second.
CLOSED, OPEN = 0.05, 0.95


@runtime_checkable
class HasStatistics(Protocol):
    """Module that reports statistics."""

    def statistics(self, *inputs: Any) -> Statistics:
        """Return statistics of a forward pass on ``inputs``, without gradients and dropout."""


def gate_statistics(mechanism: str, gate_BNT: Tensor) -> dict[str, Tensor]:
    """Return mean, spread and the fractions of closed and open gates.

    The spread is the standard deviation over tokens, averaged over heads.
    """
    gate_BNT = gate_BNT.float()
    by_head_NX = gate_BNT.transpose(0, 1).flatten(1)
    return {
        f"{mechanism}/gate_mean": gate_BNT.mean(),
        f"{mechanism}/gate_std": by_head_NX.std(1, correction=0).mean(),
        f"{mechanism}/gate_closed": (gate_BNT < CLOSED).float().mean(),
        f"{mechanism}/gate_open": (gate_BNT > OPEN).float().mean(),
    }


def norm_ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return √(Σ part² / Σ whole²): the norm of an added part relative to its target."""
    part_norm, whole_norm = (
        torch.linalg.vector_norm(x.to(torch.promote_types(x.dtype, torch.float32)))
        for x in (part, whole)
    )
    return part_norm / whole_norm


class BlockModel(Protocol):
    """Model made of blocks."""

    h: nn.ModuleList
    training: bool

    def hidden(self, idx_BT: Tensor) -> Tensor:
        """Run all blocks."""


@torch.no_grad()
def collect_statistics(model: BlockModel, idx_BT: Tensor) -> StatisticsByLayer:
    """Return the statistics of every submodule of ``model`` on ``idx_BT``; ``model`` is not changed.

    Runs under the autocast context of the caller. Requires evaluation mode.
    """
    assert not model.training, "statistics require evaluation mode"
    values_by_block: list[dict[str, Tensor]] = [{} for _ in model.h]
    hooks = [
        part.register_forward_hook(_collect_into(values))
        for block, values in zip(model.h, values_by_block, strict=True)
        for part in block.modules()
        if isinstance(part, HasStatistics)
    ]
    try:
        model.hidden(idx_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return _by_name(values_by_block)


def _collect_into(values: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    """Return a forward hook that adds the statistics of a module to ``values``."""

    def collect(part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        assert isinstance(part, HasStatistics)
        values.update(part.statistics(*inputs))

    return collect


def _by_name(values_by_block: Sequence[Mapping[str, Tensor]]) -> StatisticsByLayer:
    """Regroup values by name; all tensors are copied from the device at once."""
    tensors = [value.double() for values in values_by_block for value in values.values()]
    scalars = iter(torch.stack(tensors).tolist() if tensors else [])
    layers: StatisticsByLayer = {}
    for layer, values in enumerate(values_by_block):
        for name in values:
            scalar = next(scalars)
            row = layers.setdefault(name, [None] * len(values_by_block))
            row[layer] = scalar if math.isfinite(scalar) else None
    return layers
