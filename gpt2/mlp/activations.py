"""Activations of the MLP; imports no torch.

An activation is a function from the outputs of ``c_fc`` to the M units of the hidden layer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lib.config.registry import Registry


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


@dataclass(frozen=True)
class GeluTanhOptions(ActivationOptions):
    """GPT-2's GELU: the tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    name: ClassVar[str] = "gelu_tanh"

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Return two names of the same function, in Python and as a torch kernel."""
        return ("gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class GeluExactOptions(ActivationOptions):
    """Exact GELU, x Φ(x) (arXiv 1606.08415)."""

    name: ClassVar[str] = "gelu_exact"

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Return the name of the exact form."""
        return ("gelu",)


ACTIVATIONS: Registry[ActivationOptions] = Registry(
    "activation", GeluTanhOptions, GeluExactOptions, choice="ACTIVATION"
)
