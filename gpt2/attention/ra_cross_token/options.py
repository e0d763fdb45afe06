"""Options of RA-CT: g = σ(scale_h · statistic + bias_h) of every row of attention weights."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import Shape
from lib.binding import symbol


@dataclass(frozen=True)
class RaCrossTokenOptions:
    """Off means α = 0: rows are multiplied by one.

    ``mode``: topk (sum of the k largest weights), max, entropy (divided by ln(i+1)) or
    rms (root of the sum of squares). ``apply``: output scales a head's output after aggregation;
    weights scales the row's scores and takes the softmax again.
    """

    name: ClassVar[str] = "ra_cross_token"

    mode: str = symbol("RA_CROSS_TOKEN_MODE")
    apply: str = symbol("RA_CROSS_TOKEN_APPLY")
    alpha: float = symbol("RA_CROSS_TOKEN_ALPHA", low=0.0, high=1.0)
    topk: int = symbol("RA_CROSS_TOKEN_TOPK")
    scale: float = symbol("RA_CROSS_TOKEN_SCALE", low=-10.0, high=10.0)
    bias: float = symbol("RA_CROSS_TOKEN_BIAS", low=-10.0, high=10.0)
    # One statistic for all heads of a token: their mean.
    head_average: bool = symbol("RA_CROSS_TOKEN_HEAD_AVERAGE")
    # No gradient through the statistic.
    detach_stats: bool = symbol("RA_CROSS_TOKEN_DETACH_STATS")

    @property
    def lacks_joined(self) -> str:
        """The statistics that need a row's weights themselves."""
        return f"RA_CROSS_TOKEN_MODE_{self.mode.upper()}" if self.mode in ("topk", "max") else ""

    def num_params(self, shape: Shape) -> int:
        """A scale and a bias per head."""
        return 2 * shape.n_head

    def flops_per_token(self, shape: Shape, keys: float) -> float:
        """About one operation a weight for the statistic; ``weights`` takes the softmax again."""
        passes = 2 if self.apply == "weights" else 1
        return passes * shape.n_head * keys
