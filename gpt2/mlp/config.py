"""Configuration of the MLP: the registered mechanisms and the sizing; does not import torch.

The ratio r of a block is (MLP parameters, mechanisms included) / (attention parameters), without
biases; GPT-2's is 2.0. With ``sizing = ratio`` the hidden width follows from r, from the attention
parameters and from the share β of the sized mechanisms, so a study applies to every model size. With
``sizing = params``, r follows from the parameters of the whole model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpt2.mlp.activations import ACTIVATIONS, ActivationOptions
from gpt2.mlp.mlp_attn_gate.options import MlpAttnGateOptions
from gpt2.mlp.mlp_cross_token.options import MlpCrossTokenOptions
from gpt2.mlp.mlp_latent.options import MlpLatentOptions
from gpt2.mlp.options import LayerSpec, MlpMechanismOptions
from gpt2.shape import ModelShape, nearest_multiple
from lib.config.field import SymbolValue, component_field, from_symbols, kconfig_field
from lib.config.registry import Registry
from lib.config.small_form import always, scale_width
from lib.errors import ConfigError, Problem

# In the order in which the MLP applies them.
MECHANISMS: Registry[MlpMechanismOptions] = Registry(
    "MLP mechanism", MlpCrossTokenOptions, MlpLatentOptions, MlpAttnGateOptions
)
# From this n_embd on, hidden widths are multiples of 64 and mechanism widths of 8.
COARSE_ROUNDING_WIDTH = 512
# Below this n_embd, rounding cannot keep the ratio within 1 %.
MIN_RATIO_N_EMBD = 96
RATIO_TOLERANCE = 0.01
PARAMS_TOLERANCE = 0.01


@dataclass(frozen=True)
class MlpWidths:
    """Widths of the MLP of one block: hidden units M and the width of each built mechanism."""

    hidden: int
    widths: Mapping[str, int]


@dataclass(frozen=True)
class MlpConfig:
    """Configuration of the MLP: activation, sizing and mechanisms."""

    mechanisms: tuple[MlpMechanismOptions, ...]
    activation: ActivationOptions = component_field(ACTIVATIONS)
    # hidden, ratio or params
    sizing: str = kconfig_field("MLP_SIZING")
    # M; 0 selects GPT-2's 4C.
    hidden: int = kconfig_field("MLP_HIDDEN", small=scale_width(8, 8))
    # No small width allows a ratio below 0.5.
    ratio: float = kconfig_field("MLP_RATIO", low=0.1, high=20.0)
    # β, the fraction of MLP parameters for sized mechanisms, split evenly among them.
    share: float = kconfig_field("MLP_SHARE", low=0.0, high=0.9)
    # Of the whole model; 0 selects GPT-2's. A small form cannot reach a given number.
    model_params: int = kconfig_field("MODEL_PARAMS", small=always(0))
    # r with ``sizing = params``.
    derived_ratio: float = field(default=0.0, metadata={"identity": False})

    @classmethod
    def from_values(cls, values: Mapping[str, SymbolValue]) -> "MlpConfig":
        """Build the configured components. Raises ConfigError if a symbol is invalid."""
        return from_symbols(cls, values, mechanisms=MECHANISMS.bind(values))

    def target_params(self, shape: ModelShape) -> int:
        """Return the parameters that the whole model has with ``sizing = params``."""
        return self.model_params or shape.gpt2_params

    def with_params(self, site: LayerSpec, others: int) -> "MlpConfig":
        """Return the configuration with the ratio at which the model has its target size.

        ``others`` are the parameters outside the MLPs.
        """
        shape = site.shape
        each = (self.target_params(shape) - others) / shape.n_layer - shape.n_embd * shape.bias
        per_unit = self._weights_per_unit(site)
        biases = self.activation.fc_outputs * shape.bias
        weights = each * per_unit / (per_unit + biases)
        return replace(self, derived_ratio=weights / site.attention.weights(shape))

    def built(self, site: LayerSpec) -> list[MlpMechanismOptions]:
        """Return the mechanisms built in a block."""
        return [m for m in self.mechanisms if m.in_block(site)]

    def reads_weights(self, site: LayerSpec) -> bool:
        """Return whether the MLP of a block reads attention weights."""
        return any(m.reads_weights for m in self.built(site))

    def size(self, site: LayerSpec) -> MlpWidths:
        """Return the widths of the MLP of a block."""
        built = self.built(site)
        n_embd = site.shape.n_embd
        if self.sizing == "hidden":
            hidden = self.hidden or 4 * n_embd
            return MlpWidths(hidden, {m.name: m.given_width() for m in built})
        ratio = self.derived_ratio if self.sizing == "params" else self.ratio
        total = ratio * site.attention.weights(site.shape)
        each = total * self.share / max(1, sum(m.sized for m in self.mechanisms))
        sized = [m for m in built if m.sized]
        # A mechanism without a free width adds parameters to every hidden unit.
        per_unit = self._weights_per_unit(site) + sum(
            m.weights(1, 0, site) for m in built if not m.sized
        )
        coarse = self.sizing == "ratio" and n_embd >= COARSE_ROUNDING_WIDTH
        hidden_step, width_step = (64, 8) if coarse else (8, 1)
        hidden = nearest_multiple((total - each * len(sized)) / per_unit, hidden_step)
        widths = {m.name: 0 for m in built}
        for mechanism in sized:
            # Compensate the rounding of M, which has the coarser steps.
            budget = (total - hidden * per_unit) / len(sized)
            widths[mechanism.name] = nearest_multiple(
                mechanism.width_for(budget, hidden, site), width_step
            )
        return MlpWidths(hidden, widths)

    def weights(self, site: LayerSpec) -> int:
        """Return the parameters of a block's MLP without biases, mechanisms included."""
        size = self.size(site)
        parts = (m.weights(size.hidden, size.widths[m.name], site) for m in self.built(site))
        return self._weights_per_unit(site) * size.hidden + sum(parts)

    def num_params(self, site: LayerSpec) -> int:
        """Return the parameters of a block's MLP."""
        size = self.size(site)
        parts = (m.num_params(size.hidden, size.widths[m.name], site) for m in self.built(site))
        biases = self.activation.fc_outputs * size.hidden + site.shape.n_embd
        dense = self._weights_per_unit(site) * size.hidden + biases * site.shape.bias
        return dense + sum(parts)

    def flops_per_token(self, site: LayerSpec) -> float:
        """Return the forward FLOPs per token in a block's MLP."""
        size = self.size(site)
        parts = (
            m.flops_per_token(size.hidden, size.widths[m.name], site) for m in self.built(site)
        )
        return 2 * self._weights_per_unit(site) * size.hidden + sum(parts)

    def cached_numbers(self, site: LayerSpec, length: int) -> int:
        """Return the cached elements for ``length`` tokens in a block's MLP."""
        widths = self.size(site).widths
        return sum(m.cached_numbers(widths[m.name], length, site) for m in self.built(site))

    def _weights_per_unit(self, site: LayerSpec) -> int:
        """Return the weights of c_fc and c_proj for each hidden unit."""
        return (self.activation.fc_outputs + 1) * site.shape.n_embd

    def built_ratio(self, site: LayerSpec) -> float:
        """Return MLP parameters / attention parameters of a block, without biases."""
        return self.weights(site) / site.attention.weights(site.shape)

    def check_params(self, shape: ModelShape, params: int) -> None:
        """Raise ConfigError if a model of ``params`` parameters differs from its target size."""
        target = self.target_params(shape)
        if self.sizing == "params" and abs(params / target - 1) > PARAMS_TOLERANCE:
            what = f"MODEL_PARAMS: unreachable (expected {target:,} within 1 %, got {params:,})"
            advice = "set another MODEL_PARAMS, N_LAYER or N_EMBD"
            raise ConfigError(Problem(what, next=advice, code="config.params-unreachable"))

    def check_ratio(self, site: LayerSpec) -> None:
        """Raise ConfigError if the ratio of a block deviates from MLP_RATIO by more than 1 %."""
        if self.sizing != "ratio":
            return
        if site.shape.n_embd < MIN_RATIO_N_EMBD:
            raise ConfigError(
                Problem(
                    f"MLP_SIZING_RATIO: N_EMBD={site.shape.n_embd} is too small to keep the ratio "
                    f"within 1 % (expected N_EMBD >= {MIN_RATIO_N_EMBD})",
                    next="set a larger N_EMBD, or MLP_SIZING_HIDDEN",
                    code="config.ratio-unreachable",
                )
            )
        built = self.built_ratio(site)
        if abs(built / self.ratio - 1) > RATIO_TOLERANCE:
            raise ConfigError(
                Problem(
                    f"MLP_RATIO: ratio unreachable in block {site.block} "
                    f"(expected {self.ratio}, got {built:.4f})",
                    next="set another MLP_SHARE, MLP_RATIO or N_EMBD",
                    code="config.ratio-unreachable",
                )
            )
