"""Interface of the options of MLP mechanisms; does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from gpt2.attention.config import AttentionConfig
from gpt2.shape import ModelShape
from lib.config.field import SymbolValue


@dataclass(frozen=True)
class LayerSpec:
    """Construction site of an MLP: model shape, attention of the block, and block index."""

    shape: ModelShape
    attention: AttentionConfig
    block: int

    @property
    def is_last(self) -> bool:
        """Return whether the block is the last one, without a next block to pass state to."""
        return self.block == self.shape.n_layer - 1


class MlpMechanismOptions(Protocol):
    """Options of a mechanism on the hidden layer of M units.

    ``width`` is the free dimension of the mechanism; 0 if it has none.
    """

    name: ClassVar[str]
    # True if the mechanism has a free width that can be sized by a share of the parameters.
    sized: ClassVar[bool]
    # True if the mechanism reads the attention weights of its block.
    reads_weights: ClassVar[bool]
    # Values of symbols with which the built mechanism has no effect.
    off: ClassVar[Mapping[str, SymbolValue]]

    def in_block(self, site: LayerSpec) -> bool:
        """Return whether the block builds the mechanism."""

    def given_width(self) -> int:
        """Return the configured width, used unless sizing is by ratio; 0 without a width."""

    def width_for(self, weights: float, hidden: int, site: LayerSpec) -> float:
        """Return the width that uses ``weights`` parameters with ``hidden`` units."""

    def weights(self, hidden: int, width: int, site: LayerSpec) -> int:
        """Return the matrix parameters, which count towards the ratio."""

    def num_params(self, hidden: int, width: int, site: LayerSpec) -> int:
        """Return all parameters."""

    def flops_per_token(self, hidden: int, width: int, site: LayerSpec) -> float:
        """Return the forward FLOPs per token."""

    def cached_numbers(self, width: int, length: int, site: LayerSpec) -> int:
        """Return the cached elements for ``length`` tokens."""
