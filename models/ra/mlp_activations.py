"""Activations of the MLP, functions from the outputs of ``c_fc`` to the hidden layer, and formulas."""

from collections.abc import Callable
from functools import partial
from math import pi, sqrt
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .mlp_options import GeluExactOptions, GeluTanhOptions

FUNCTIONS: dict[type[Any], Callable[[Tensor], Tensor]] = {
    GeluTanhOptions: partial(F.gelu, approximate="tanh"),
    GeluExactOptions: F.gelu,
}


def gelu_tanh(x: Tensor) -> Tensor:
    """Return x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
    return x * (1 + (sqrt(2 / pi) * (x + 0.044715 * x**3)).tanh()) / 2


def gelu_exact(x: Tensor) -> Tensor:
    """Return x (1 + erf(x / √2)) / 2."""
    return x * (1 + (x / sqrt(2)).erf()) / 2


REFERENCES: dict[type[Any], Callable[[Tensor], Tensor]] = {
    GeluTanhOptions: gelu_tanh,
    GeluExactOptions: gelu_exact,
}
