"""Activations of the MLP; imports no torch until one is built.

An activation is a function from the outputs of ``c_fc`` to the M units of the hidden layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import pi, sqrt
from typing import TYPE_CHECKING, ClassVar

from lib.config.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ActivationOptions(ABC):
    """Options of an activation."""

    name: ClassVar[str]
    # Outputs of c_fc for each hidden unit: 2 for a gated activation such as SwiGLU.
    fc_outputs: ClassVar[int] = 1

    @property
    @abstractmethod
    def hf_names(self) -> tuple[str, ...]:
        """Return the names of the function in transformers' GPT-2, the exported one first.

        The tuple is empty if transformers' GPT-2 does not support the activation.
        """

    @abstractmethod
    def build(self) -> "Callable[[Tensor], Tensor]":
        """Return the function."""

    @abstractmethod
    def reference(self, x: "Tensor") -> "Tensor":
        """Return the value of the function from its formula."""


@dataclass(frozen=True)
class GeluTanhOptions(ActivationOptions):
    """GPT-2's GELU: the tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    name: ClassVar[str] = "gelu_tanh"

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Return two names of the same function, in Python and as a torch kernel."""
        return ("gelu_new", "gelu_pytorch_tanh")

    def build(self) -> "Callable[[Tensor], Tensor]":
        """Return torch's approximation."""
        import torch.nn.functional as F

        return partial(F.gelu, approximate="tanh")

    def reference(self, x: "Tensor") -> "Tensor":
        """Return x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2."""
        return x * (1 + (sqrt(2 / pi) * (x + 0.044715 * x**3)).tanh()) / 2


@dataclass(frozen=True)
class GeluExactOptions(ActivationOptions):
    """Exact GELU, x Φ(x) (arXiv 1606.08415)."""

    name: ClassVar[str] = "gelu_exact"

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Return the name of the exact form."""
        return ("gelu",)

    def build(self) -> "Callable[[Tensor], Tensor]":
        """Return torch's GELU."""
        import torch.nn.functional as F

        return F.gelu

    def reference(self, x: "Tensor") -> "Tensor":
        """Return x (1 + erf(x / √2)) / 2."""
        return x * (1 + (x / sqrt(2)).erf()) / 2


ACTIVATIONS: Registry[ActivationOptions] = Registry(
    "activation", GeluTanhOptions, GeluExactOptions, choice="ACTIVATION"
)
