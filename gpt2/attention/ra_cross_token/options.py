"""Options of RA-CT: g = σ(scale_h · statistic + bias_h) for every row of attention weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import ModelShape
from lib.config.field import SymbolValue, kconfig_field
from lib.config.small_form import scale_tokens

# Largest k of the Triton kernels, which sort a tile of columns.
_MAX_TILE_TOPK = 32


@dataclass(frozen=True)
class RaCrossTokenOptions:
    """Options of the cross-token gate; α = 0 disables it (rows are multiplied by one).

    ``mode``: topk (sum of the k largest weights), max, entropy (divided by ln(i+1)) or rms (root of
    the sum of squares). ``apply``: output scales the head output after aggregation; weights scales
    the scores of the row and computes the softmax a second time.
    """

    name: ClassVar[str] = "ra_cross_token"
    off: ClassVar[Mapping[str, SymbolValue]] = {"RA_CROSS_TOKEN_ALPHA": "0.0"}

    mode: str = kconfig_field("RA_CROSS_TOKEN_MODE")
    apply: str = kconfig_field("RA_CROSS_TOKEN_APPLY")
    alpha: float = kconfig_field("RA_CROSS_TOKEN_ALPHA", low=0.0, high=1.0)
    topk: int = kconfig_field("RA_CROSS_TOKEN_TOPK", small=scale_tokens)
    # The gradient of a saturated gate is below fp32 resolution.
    scale: float = kconfig_field("RA_CROSS_TOKEN_SCALE", low=-10.0, high=10.0)
    bias: float = kconfig_field("RA_CROSS_TOKEN_BIAS", low=-10.0, high=10.0)
    # Average the statistic of a token over heads.
    head_average: bool = kconfig_field("RA_CROSS_TOKEN_HEAD_AVERAGE")
    # No gradient through the statistic.
    detach_stats: bool = kconfig_field("RA_CROSS_TOKEN_DETACH_STATS")

    @property
    def lacks_triton(self) -> str:
        """Return k if a list of so many weights of each row exceeds the registers, else ""."""
        many = self.mode == "topk" and self.topk > _MAX_TILE_TOPK
        return f"RA_CROSS_TOKEN_TOPK={self.topk} (maximum {_MAX_TILE_TOPK})" if many else ""

    def num_params(self, shape: ModelShape) -> int:
        """Return 2N: a scale and a bias per head."""
        return 2 * shape.n_head

    def flops_per_token(self, shape: ModelShape, keys: float) -> float:
        """Return about one FLOP per weight; ``weights`` doubles it for the second softmax."""
        passes = 2 if self.apply == "weights" else 1
        return passes * shape.n_head * keys

    @property
    def scales_scores(self) -> bool:
        """Return whether the factor scales the scores of the row instead of the head output."""
        return self.apply == "weights"
