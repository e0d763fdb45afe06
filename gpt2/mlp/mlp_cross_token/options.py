"""Options of the cross-token MLP: h ← h + α (W h) A Bᵀ with W the block's attention weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2.mlp.options import LayerSpec
from lib.config.field import SymbolValue, kconfig_field
from lib.config.small_form import scale_tokens, scale_width


@dataclass(frozen=True)
class MlpCrossTokenOptions:
    """Options of the cross-token MLP; α = 0 disables it. A and B are M × b.

    W is the mean over heads of the attention rows, sparsified per row and renormalized.
    ``sparsity``: topk keeps the k largest weights; rms keeps p ≥ τ times the root mean square of
    the row over visible tokens; none keeps all.
    """

    name: ClassVar[str] = "mlp_cross_token"
    sized: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True
    off: ClassVar[Mapping[str, SymbolValue]] = {
        "MLP_CROSS_TOKEN_ALPHA": "0.0",
        "MLP_CROSS_TOKEN_DIM": 8,
    }

    alpha: float = kconfig_field("MLP_CROSS_TOKEN_ALPHA", low=0.0, high=2.0)
    sparsity: str = kconfig_field("MLP_CROSS_TOKEN_SPARSITY")
    topk: int = kconfig_field("MLP_CROSS_TOKEN_TOPK", small=scale_tokens)
    # Above 1, no weight of a uniform row remains, and all rows are nearly uniform at first.
    tau: float = kconfig_field("MLP_CROSS_TOKEN_TAU", low=0.0, high=10.0)
    # No gradient through the attention weights.
    detach_weights: bool = kconfig_field("MLP_CROSS_TOKEN_DETACH_WEIGHTS")
    # b, used unless sizing is by ratio.
    dim: int = kconfig_field("MLP_CROSS_TOKEN_DIM", small=scale_width(2, 2))

    def in_block(self, site: LayerSpec) -> bool:
        """Return True: every block builds the mechanism."""
        return True

    def given_width(self) -> int:
        """Return b."""
        return self.dim

    def width_for(self, weights: float, hidden: int, site: LayerSpec) -> float:
        """Return b = weights / 2M."""
        return weights / (2 * hidden)

    def weights(self, hidden: int, width: int, site: LayerSpec) -> int:
        """Return 2·M·b: the elements of A and B."""
        return 2 * hidden * width

    def num_params(self, hidden: int, width: int, site: LayerSpec) -> int:
        """Return 2·M·b: A and B have no biases."""
        return self.weights(hidden, width, site)

    def flops_per_token(self, hidden: int, width: int, site: LayerSpec) -> float:
        """Return the FLOPs of A and B, the mean over heads, and the mix in the bottleneck."""
        keys = site.attention.pattern.mean_keys(site.shape.block_size)
        mix = (site.shape.n_head + 2 * width) * keys
        return 2 * self.weights(hidden, width, site) + mix

    def cached_numbers(self, width: int, length: int, site: LayerSpec) -> int:
        """Return the elements of h A for every token visible to the next one."""
        return width * site.attention.pattern.cached_tokens(length)
