"""Options of the MLP → attention gate: γ = σ(W₂ W₁ h + b) scales the next block's heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2.mlp.options import LayerSpec
from lib.config.field import SymbolValue, kconfig_field
from lib.config.small_form import scale_width


@dataclass(frozen=True)
class MlpAttnGateOptions:
    """Options of the gate: the next block scales head outputs by (1 − α) + α γ; α = 0 disables it.

    W₁ is M × G, W₂ is G × N, b has one entry per head. The last block has no next block and builds
    no gate.
    """

    name: ClassVar[str] = "mlp_attn_gate"
    sized: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = False
    off: ClassVar[Mapping[str, SymbolValue]] = {
        "MLP_ATTN_GATE_ALPHA": "0.0",
        "MLP_ATTN_GATE_DIM": 8,
    }

    alpha: float = kconfig_field("MLP_ATTN_GATE_ALPHA", low=0.0, high=1.0)
    # The gradient of a saturated gate is below fp32 resolution.
    bias: float = kconfig_field("MLP_ATTN_GATE_BIAS", low=-10.0, high=10.0)
    # G, used unless sizing is by ratio.
    dim: int = kconfig_field("MLP_ATTN_GATE_DIM", small=scale_width(2, 2))
    # The gate's input is the causal running mean of W₁ h instead of the current value.
    pooled: bool = kconfig_field("MLP_ATTN_GATE_POOLED")

    def in_block(self, site: LayerSpec) -> bool:
        """Return whether the block is not the last one."""
        return not site.is_last

    def given_width(self) -> int:
        """Return G."""
        return self.dim

    def width_for(self, weights: float, hidden: int, site: LayerSpec) -> float:
        """Return G = weights / (M + N)."""
        return weights / (hidden + site.shape.n_head)

    def weights(self, hidden: int, width: int, site: LayerSpec) -> int:
        """Return G (M + N)."""
        return width * (hidden + site.shape.n_head)

    def num_params(self, hidden: int, width: int, site: LayerSpec) -> int:
        """Return the weights plus N biases."""
        return self.weights(hidden, width, site) + site.shape.n_head

    def flops_per_token(self, hidden: int, width: int, site: LayerSpec) -> float:
        """Return two FLOPs (multiply and add) per weight."""
        return 2 * self.weights(hidden, width, site)

    def cached_numbers(self, width: int, length: int, site: LayerSpec) -> int:
        """Return G if pooled (the running sum of W₁ h), else 0."""
        return width if self.pooled and length else 0
