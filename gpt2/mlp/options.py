"""What the MLP is made of and how wide it is; imports no torch.

The ratio r is (MLP parameters, mechanisms included) / (attention parameters) of a block, biases
left out; GPT-2's is 2.0. With ``sizing = ratio`` the hidden width follows from r, from the
attention's parameters and from the share β that the sized mechanisms get, so that a study holds at
every model size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gpt2.attention.options import AttentionConfig
from gpt2.mlp import MECHANISMS
from gpt2.shape import Shape, nearest_multiple
from lib.binding import Value, bind, symbol
from lib.errors import ConfigError

# From this width on, hidden widths are multiples of 64 and mechanism widths of 8.
WIDE = 512
# Below this width the rounding cannot hold the ratio to 1 %.
NARROWEST_RATIO_WIDTH = 96
RATIO_TOLERANCE = 0.01


@dataclass(frozen=True)
class BlockSite:
    """Where an MLP stands: the model's shape, the attention of its block, and the block's index."""

    shape: Shape
    attention: AttentionConfig
    block: int

    @property
    def is_last(self) -> bool:
        """Whether there is no next block to hand anything to."""
        return self.block == self.shape.n_layer - 1


class MlpMechanismOptions(Protocol):
    """A mechanism on the hidden layer of M units, with a free width or without one.

    ``width`` is the mechanism's own free dimension; 0 for a mechanism that has none.
    """

    name: str
    # Whether the mechanism has a width of its own that a share of parameters can pay for.
    sized: bool
    # Whether the mechanism reads its block's attention weights.
    reads_weights: bool

    def in_block(self, site: BlockSite) -> bool:
        """Whether the block builds the mechanism."""

    def given_width(self) -> int:
        """The configured width, where the sizing is not by ratio; 0 without a width."""

    def width_for(self, weights: float, hidden: int, site: BlockSite) -> float:
        """The width that spends ``weights`` parameters beside ``hidden`` units."""

    def weights(self, hidden: int, width: int, site: BlockSite) -> int:
        """Parameters of two or more dimensions: what the ratio counts."""

    def num_params(self, hidden: int, width: int, site: BlockSite) -> int:
        """All parameters."""

    def flops_per_token(self, hidden: int, width: int, site: BlockSite) -> float:
        """Forward FLOPs for one token."""

    def cached_numbers(self, width: int, length: int, site: BlockSite) -> int:
        """What decoding keeps of ``length`` tokens."""


@dataclass(frozen=True)
class BlockSize:
    """The widths of one block's MLP: hidden units M and each built mechanism's own width."""

    hidden: int
    widths: Mapping[str, int]


@dataclass(frozen=True)
class MlpConfig:
    """Sizing and mechanisms."""

    mechanisms: tuple[MlpMechanismOptions, ...]
    # hidden or ratio
    sizing: str = symbol("MLP_SIZING")
    # M; 0 asks for GPT-2's 4C.
    hidden: int = symbol("MLP_HIDDEN")
    ratio: float = symbol("MLP_RATIO", low=0.1, high=20.0)
    # β, the part of the MLP's parameters that sized mechanisms get, split evenly among them.
    share: float = symbol("MLP_SHARE", low=0.0, high=0.9)

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> "MlpConfig":
        """Select and fill the mechanisms. ConfigError on a bad symbol."""
        return bind(cls, values, mechanisms=MECHANISMS.bind(values))

    def built(self, site: BlockSite) -> list[MlpMechanismOptions]:
        """The mechanisms that a block builds."""
        return [m for m in self.mechanisms if m.in_block(site)]

    def reads_weights(self, site: BlockSite) -> bool:
        """Whether a block's MLP reads its attention weights."""
        return any(m.reads_weights for m in self.built(site))

    def size(self, site: BlockSite) -> BlockSize:
        """The widths of a block's MLP."""
        built = self.built(site)
        n_embd = site.shape.n_embd
        if self.sizing == "hidden":
            hidden = self.hidden or 4 * n_embd
            return BlockSize(hidden, {m.name: m.given_width() for m in built})
        total = self.ratio * site.attention.weights(site.shape)
        each = total * self.share / max(1, sum(m.sized for m in self.mechanisms))
        sized = [m for m in built if m.sized]
        # A mechanism without a width of its own is paid for by every hidden unit.
        per_unit = 2 * n_embd + sum(m.weights(1, 0, site) for m in built if not m.sized)
        hidden_step, width_step = (64, 8) if n_embd >= WIDE else (8, 1)
        hidden = nearest_multiple((total - each * len(sized)) / per_unit, hidden_step)
        widths = {m.name: 0 for m in built}
        for mechanism in sized:
            # What the rounding of M took or left is made up here: its steps are the coarser ones.
            left = (total - hidden * per_unit) / len(sized)
            widths[mechanism.name] = nearest_multiple(
                mechanism.width_for(left, hidden, site), width_step
            )
        return BlockSize(hidden, widths)

    def weights(self, site: BlockSite) -> int:
        """Parameters of a block's MLP without biases, mechanisms included."""
        size = self.size(site)
        parts = (m.weights(size.hidden, size.widths[m.name], site) for m in self.built(site))
        return 2 * site.shape.n_embd * size.hidden + sum(parts)

    def num_params(self, site: BlockSite) -> int:
        """Parameters of a block's MLP."""
        size = self.size(site)
        parts = (m.num_params(size.hidden, size.widths[m.name], site) for m in self.built(site))
        biases = size.hidden + site.shape.n_embd if site.shape.bias else 0
        return 2 * site.shape.n_embd * size.hidden + biases + sum(parts)

    def flops_per_token(self, site: BlockSite) -> float:
        """Forward FLOPs for one token in a block's MLP."""
        size = self.size(site)
        parts = (
            m.flops_per_token(size.hidden, size.widths[m.name], site) for m in self.built(site)
        )
        return 4 * site.shape.n_embd * size.hidden + sum(parts)

    def cached_numbers(self, site: BlockSite, length: int) -> int:
        """What decoding keeps of ``length`` tokens in a block's MLP."""
        widths = self.size(site).widths
        return sum(m.cached_numbers(widths[m.name], length, site) for m in self.built(site))

    def built_ratio(self, site: BlockSite) -> float:
        """MLP parameters / attention parameters of a block, biases left out."""
        return self.weights(site) / site.attention.weights(site.shape)

    def check_ratio(self, site: BlockSite) -> None:
        """ConfigError where a block's ratio is further than 1 % from the one asked for."""
        if self.sizing != "ratio":
            return
        if site.shape.n_embd < NARROWEST_RATIO_WIDTH:
            raise ConfigError(
                f"MLP_SIZING_RATIO: N_EMBD={site.shape.n_embd} is too narrow to hold a ratio to "
                f"1 %; take N_EMBD >= {NARROWEST_RATIO_WIDTH} or MLP_SIZING_HIDDEN"
            )
        built = self.built_ratio(site)
        if abs(built / self.ratio - 1) > RATIO_TOLERANCE:
            raise ConfigError(
                f"MLP_RATIO: block {site.block} comes out at {built:.4f} instead of {self.ratio}; "
                "take another MLP_SHARE, MLP_RATIO or N_EMBD"
            )
