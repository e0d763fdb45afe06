"""Deterministic parameter values by name, equal in every model that has the parameter."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from lib.repro.streams import stream_seed

# Large enough to affect every product, small enough not to saturate a softmax.
_STD = 0.08
_VECTOR_NOISE = 0.2


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill every parameter with nonzero values that depend only on its name and shape.

    Vectors keep the values from their constructor and get noise added, because the start may be a
    constant of the configuration.
    """
    for name, parameter in model.named_parameters():
        noise = _random_tensor(name, tuple(parameter.shape)).to(parameter.dtype)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=_VECTOR_NOISE)
        else:
            parameter.copy_(noise * _STD)


def projection(name: str, tensor: Tensor) -> tuple[float, float]:
    """Return a tensor's fingerprint: inner product with a random tensor, and norm.

    The random tensor depends only on ``name`` and the shape.
    """
    direction = _random_tensor(f"projection/{name}", tuple(tensor.shape))
    tensor = tensor.detach().double()
    return float((tensor * direction).sum()), float(tensor.norm())


def projections(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the projection of each tensor."""
    return {name: projection(name, tensor) for name, tensor in tensors.items()}


@lru_cache(maxsize=512)
def _random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal values in float64."""
    generator = torch.Generator().manual_seed(stream_seed(0, f"check/{name}/{shape}"))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
