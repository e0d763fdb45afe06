"""What mechanisms say of themselves: how spread attention is, how open gates are.

A part of the model with a method ``statistics`` is asked, with the inputs of its forward pass, in a
pass of its own; nothing here knows which parts there are.

B batch, T tokens, N heads, X numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from gpt2.model import GPT

# ``<mechanism>/<what>`` → one number. Over the layers of a model it is told as the mean; where the
# name ends in _min or _max, as the least or the largest.
Values = Mapping[str, Tensor]
# A value for each block; None where the block has no such mechanism, or the value is not finite.
Layers = dict[str, list[float | None]]

# A gate is called closed below the first and open above the second.
CLOSED, OPEN = 0.05, 0.95


@runtime_checkable
class Telling(Protocol):
    """A module that has something to say beyond what it computes."""

    def statistics(self, *inputs: Any) -> Values:
        """Of one forward pass with these ``inputs``, without gradients and without dropout."""


class Counted(Protocol):
    """How often something happened."""

    count: int


@runtime_checkable
class FallingBack(Protocol):
    """A module that counts how often it took a slower way than the one that was asked for."""

    fallbacks: Counted


def fallbacks_of(model: nn.Module) -> int:
    """Of all parts of ``model`` so far."""
    return sum(part.fallbacks.count for part in model.modules() if isinstance(part, FallingBack))


def gate_values(mechanism: str, gate_BNT: Tensor) -> dict[str, Tensor]:
    """Mean, spread over tokens (the heads' mean standard deviation), shares closed and open."""
    gate_BNT = gate_BNT.float()
    by_head_NX = gate_BNT.transpose(0, 1).flatten(1)
    return {
        f"{mechanism}/gate_mean": gate_BNT.mean(),
        f"{mechanism}/gate_std": by_head_NX.std(1, correction=0).mean(),
        f"{mechanism}/gate_closed": (gate_BNT < CLOSED).float().mean(),
        f"{mechanism}/gate_open": (gate_BNT > OPEN).float().mean(),
    }


def relative_size(part: Tensor, whole: Tensor) -> Tensor:
    """√(Σ part² / Σ whole²): how large what was added is beside what it was added to."""
    return torch.linalg.vector_norm(part.float()) / torch.linalg.vector_norm(whole.float())


@torch.no_grad()
def statistics_of(model: "GPT", idx_BT: Tensor) -> Layers:
    """What every part of ``model`` tells of a forward pass on ``idx``; leaves nothing behind.

    Inside the forward pass's autocast context. The model has to be in evaluation mode.
    """
    assert not model.training, "dropout would draw"
    told: list[dict[str, Tensor]] = [{} for _ in model.h]
    hooks = [
        part.register_forward_hook(_ask(values))
        for block, values in zip(model.h, told, strict=True)
        for part in block.modules()
        if isinstance(part, Telling)
    ]
    try:
        model.hidden(idx_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return _by_name(told)


def _ask(values: dict[str, Tensor]) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    """A forward hook."""

    def ask(part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        assert isinstance(part, Telling)
        values.update(part.statistics(*inputs))

    return ask


def _by_name(told: Sequence[Mapping[str, Tensor]]) -> Layers:
    """Read from the device at once."""
    tensors = [value.double() for values in told for value in values.values()]
    numbers = iter(torch.stack(tensors).tolist() if tensors else [])
    found: Layers = {}
    for layer, values in enumerate(told):
        for name in values:
            number = next(numbers)
            row = found.setdefault(name, [None] * len(told))
            row[layer] = number if math.isfinite(number) else None
    return found
