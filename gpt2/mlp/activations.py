"""Activations of the MLP, functions from the outputs of ``c_fc`` to the hidden layer, and formulas."""

from collections.abc import Callable
from functools import partial
from math import pi, sqrt
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gpt2.mlp.options import GeluExactOptions, GeluTanhOptions, Relu2Options, SwigluOptions


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


FUNCTIONS: dict[type[Any], Callable[[Tensor], Tensor]] = {
    GeluTanhOptions: partial(F.gelu, approximate="tanh"),
    GeluExactOptions: F.gelu,
    Relu2Options: lambda x: F.relu(x).square(),
    SwigluOptions: _swiglu,
}


def gelu_tanh(x: Tensor) -> Tensor:
    """Return x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    return x * (1 + (sqrt(2 / pi) * (x + 0.044715 * x**3)).tanh()) / 2


def gelu_exact(x: Tensor) -> Tensor:
    """Return x (1 + erf(x / √2)) / 2."""
    return x * (1 + (x / sqrt(2)).erf()) / 2


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)²."""
    return x * x * (x > 0)


def swiglu(x: Tensor) -> Tensor:
    """Return u σ(u) v for the first half u and the second half v."""
    half = x.shape[-1] // 2
    return x[..., :half] / (1 + (-x[..., :half]).exp()) * x[..., half:]


REFERENCES: dict[type[Any], Callable[[Tensor], Tensor]] = {
    GeluTanhOptions: gelu_tanh,
    GeluExactOptions: gelu_exact,
    Relu2Options: relu2,
    SwigluOptions: swiglu,
}
