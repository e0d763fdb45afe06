"""Parameters and fingerprints by name: the same in every model that has the parameter."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from lib.repro.streams import stream_seed

# Large enough to matter in every product, small enough to saturate no softmax.
_STD = 0.08
_AROUND_START = 0.2


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give every parameter values that depend on its name and shape alone, none of them zero.

    Vectors keep the start that their constructor gave them and get the values on top: a constant
    of the configuration may stand in them.
    """
    for name, parameter in model.named_parameters():
        drawn = _drawn(name, tuple(parameter.shape)).to(parameter.dtype)
        if parameter.ndim < 2:
            parameter.add_(drawn, alpha=_AROUND_START)
        else:
            parameter.copy_(drawn * _STD)


def projection(name: str, tensor: Tensor) -> tuple[float, float]:
    """A tensor as its product with a random one of its name and shape, and its norm."""
    other = _drawn(f"projection/{name}", tuple(tensor.shape))
    tensor = tensor.detach().double()
    return float((tensor * other).sum()), float(tensor.norm())


def projections(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """The projection of each tensor."""
    return {name: projection(name, tensor) for name, tensor in tensors.items()}


@lru_cache(maxsize=512)
def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal, float64."""
    generator = torch.Generator().manual_seed(stream_seed(0, f"check/{name}/{shape}"))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
