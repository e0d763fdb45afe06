"""Options of the MLP: activation, mechanisms on the hidden layer, and their sizes.

Imports no torch. The module and the formula of a mechanism are in the file of its name, those of an
activation in ``activations.py``; M hidden units, N heads, R latent dim.

The ratio r of a block is (MLP parameters, mechanisms included) / (attention parameters), without
biases; GPT-2's is 2.0. With ``sizing = ratio`` the hidden width follows from r, from the attention
parameters and from the share β of the sized mechanisms, so a study applies to every model size.
With ``sizing = params``, r follows from the parameters of the whole model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from gpt2.attention.config import AttentionConfig
from gpt2.attention.options import AttentionWeightsOptions, LatentOptions, PartOptions
from gpt2.shape import Cost, ModelShape, nearest_multiple
from lib.config.field import SymbolValue, component_field, from_symbols, kconfig_field
from lib.config.registry import Registry
from lib.config.small_form import always, scale_tokens, scale_width
from lib.errors import ConfigError, Problem

# From this n_embd on, hidden widths are multiples of 64 and mechanism widths of 8.
COARSE_ROUNDING_WIDTH = 512
# Below this n_embd, rounding cannot keep the ratio within 1 %.
MIN_RATIO_N_EMBD = 96
RATIO_TOLERANCE = 0.01
PARAMS_TOLERANCE = 0.01


@dataclass(frozen=True)
class LayerSpec:
    """Construction site of an MLP: model shape, attention of the block, and block index."""

    shape: ModelShape
    attention: AttentionConfig
    block: int

    @property
    def is_last(self) -> bool:
        return self.block == self.shape.n_layer - 1


class ActivationOptions:
    """Options of an activation: a function from the outputs of ``c_fc`` to the hidden layer."""

    name: ClassVar[str]
    # Outputs of c_fc for each hidden unit: 2 for a gated activation such as SwiGLU.
    fc_outputs: ClassVar[int] = 1
    # Names of the function in transformers' GPT-2, the exported one first; () if it lacks one.
    hf_names: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class GeluTanhOptions(ActivationOptions):
    """GPT-2's GELU: the tanh approximation (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    name: ClassVar[str] = "gelu_tanh"
    # One function, in Python and as a torch kernel.
    hf_names: ClassVar[tuple[str, ...]] = ("gelu_new", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class GeluExactOptions(ActivationOptions):
    """Exact GELU, x Φ(x) (arXiv 1606.08415)."""

    name: ClassVar[str] = "gelu_exact"
    hf_names: ClassVar[tuple[str, ...]] = ("gelu",)


@dataclass(frozen=True)
class Relu2Options(ActivationOptions):
    """Squared ReLU, max(x, 0)² (So et al. 2021, arXiv 2109.08668)."""

    name: ClassVar[str] = "relu2"
    hf_names: ClassVar[tuple[str, ...]] = ("relu2",)


@dataclass(frozen=True)
class SwigluOptions(ActivationOptions):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): the first M outputs of c_fc gate the last M."""

    name: ClassVar[str] = "swiglu"
    fc_outputs: ClassVar[int] = 2


class MlpMechanismOptions(PartOptions):
    """Options of a mechanism on the hidden layer; the weights of its cost are in proportion to
    ``width``, its free dimension, if it has one.
    """

    # True if the mechanism has a free width that can be sized by a share of the parameters.
    sized: ClassVar[bool] = False
    # The configured width, which sizing by ratio or parameters replaces.
    dim: int = 0

    @property
    def request(self) -> AttentionWeightsOptions | None:
        """Return the attention weights of its block that the mechanism reads; None if none."""
        return None

    def in_block(self, site: LayerSpec) -> bool:
        return True

    def cost(self, hidden: int, width: int, site: LayerSpec) -> Cost:
        """Return the cost; its weights count towards the ratio."""
        raise NotImplementedError

    def check(self, hidden: int, site: LayerSpec) -> None:
        """Raise ConfigError if the mechanism does not fit a block with ``hidden`` units."""


@dataclass(frozen=True)
class MlpCrossTokenOptions(MlpMechanismOptions):
    """Options of the cross-token MLP; α = 0 disables it. A and B are M × b.

    W is the mean over heads of the attention rows, sparsified per row and renormalized.
    ``sparsity``: topk keeps the k largest weights; rms keeps p ≥ τ times the root mean square of
    the row over visible tokens; none keeps all.
    """

    name: ClassVar[str] = "mlp_cross_token"
    sized: ClassVar[bool] = True
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

    @property
    def request(self) -> AttentionWeightsOptions:
        return AttentionWeightsOptions(self.sparsity, self.topk, self.tau, self.detach_weights)

    def cost(self, hidden: int, width: int, site: LayerSpec) -> Cost:
        """Return A and B, the mean over heads, and the mix in the bottleneck."""
        keys = site.attention.pattern.mean_keys(site.shape.block_size)
        return Cost(2 * hidden * width, other_flops=(site.shape.n_head + 2 * width) * keys)


@dataclass(frozen=True)
class MlpLatentOptions(MlpMechanismOptions):
    """Options of the latent coupling; a is the block's c_k, α = 0 disables the coupling.

    The last block does not write: it has no next c_k. ``tying``: tied uses one W (M × R) for both
    directions, untied one per direction, scalar one factor per head over copies of c_k repeated
    along the hidden layer (W[m, r] = s_head(r) if m mod R = r).
    """

    name: ClassVar[str] = "mlp_latent"
    off: ClassVar[Mapping[str, SymbolValue]] = {"MLP_LATENT_ALPHA": "0.0"}

    alpha: float = kconfig_field("MLP_LATENT_ALPHA", low=0.0, high=2.0)
    tying: str = kconfig_field("MLP_LATENT_TYING")

    def check(self, hidden: int, site: LayerSpec) -> None:
        """Raise ConfigError if a head's scalar would scale no unit and could not be trained."""
        sizes = site.shape.n_head, self.latent_width(site), hidden
        if self.tying == "scalar" and sorted(sizes) != list(sizes):
            what = "MLP_LATENT_TYING: scalar requires N_HEAD <= LATENT_DIM <= MLP_HIDDEN"
            what, fix = (
                f"{what}, got {', '.join(map(str, sizes))}",
                "change these sizes, or set MLP_LATENT_TYING_TIED",
            )
            raise ConfigError(Problem(what, next=fix, code="config.conflict"))

    def latent_width(self, site: LayerSpec) -> int:
        assert isinstance(site.attention.projection, LatentOptions)
        return site.attention.projection.width(site.shape)

    def cost(self, hidden: int, width: int, site: LayerSpec) -> Cost:
        """Return the cost; the last block does not write: one product with W instead of two."""
        directions = 1 if site.is_last else 2
        if self.tying == "scalar":
            return Cost(vectors=site.shape.n_head, other_flops=2 * directions * hidden)
        product = hidden * self.latent_width(site)
        copies = directions if self.tying == "untied" else 1
        return Cost(copies * product, other_flops=2 * (directions - copies) * product)


@dataclass(frozen=True)
class MlpAttnGateOptions(MlpMechanismOptions):
    """Options of the gate: the next block scales head outputs by (1 − α) + α γ; α = 0 disables it.

    W₁ is M × G, W₂ is G × N, b has one entry per head. The last block has no next block and builds
    no gate.
    """

    name: ClassVar[str] = "mlp_attn_gate"
    sized: ClassVar[bool] = True
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
        return not site.is_last

    def cost(self, hidden: int, width: int, site: LayerSpec) -> Cost:
        """Return G (M + N) weights and N biases."""
        return Cost(width * (hidden + site.shape.n_head), site.shape.n_head)


ACTIVATIONS: Registry[ActivationOptions] = Registry(
    "activation",
    GeluTanhOptions,
    GeluExactOptions,
    Relu2Options,
    SwigluOptions,
    choice="ACTIVATION",
)
# In the order in which the MLP applies them.
MECHANISMS: Registry[MlpMechanismOptions] = Registry(
    "MLP mechanism", MlpCrossTokenOptions, MlpLatentOptions, MlpAttnGateOptions
)


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
        return self.model_params or shape.gpt2_params

    def with_params(self, site: LayerSpec, others: int) -> "MlpConfig":
        """Return the configuration whose ratio gives the target size with ``others`` elsewhere."""
        shape = site.shape
        each = (self.target_params(shape) - others) / shape.n_layer - shape.n_embd * shape.bias
        per_unit = self._weights_per_unit(site)
        biases = self.activation.fc_outputs * shape.bias
        weights = each * per_unit / (per_unit + biases)
        return replace(self, derived_ratio=weights / site.attention.cost(shape, site.block).weights)

    def built(self, site: LayerSpec) -> list[MlpMechanismOptions]:
        return [m for m in self.mechanisms if m.in_block(site)]

    def request(self, site: LayerSpec) -> AttentionWeightsOptions | None:
        """Return the attention weights of a block that its MLP reads; None if it reads none."""
        requests = [m.request for m in self.built(site) if m.request is not None]
        assert len(requests) <= 1, "only one mechanism per block can read attention weights"
        return requests[0] if requests else None

    def size(self, site: LayerSpec) -> MlpWidths:
        """Return the widths of the MLP of a block."""
        built, n_embd = self.built(site), site.shape.n_embd
        if self.sizing == "hidden":
            return MlpWidths(self.hidden or 4 * n_embd, {m.name: m.dim for m in built})
        ratio = self.derived_ratio if self.sizing == "params" else self.ratio
        total = ratio * site.attention.cost(site.shape, site.block).weights
        each = total * self.share / max(1, sum(m.sized for m in self.mechanisms))
        sized = [m for m in built if m.sized]
        # A mechanism without a free width adds parameters to every hidden unit.
        per_unit = self._weights_per_unit(site) + sum(
            m.cost(1, 0, site).weights for m in built if not m.sized
        )
        coarse = self.sizing == "ratio" and n_embd >= COARSE_ROUNDING_WIDTH
        hidden_step, width_step = (64, 8) if coarse else (8, 1)
        hidden = nearest_multiple((total - each * len(sized)) / per_unit, hidden_step)
        widths = {m.name: 0 for m in built}
        for mechanism in sized:
            # Compensate the rounding of M, which has the coarser steps.
            budget = (total - hidden * per_unit) / len(sized)
            width = budget / mechanism.cost(hidden, 1, site).weights
            widths[mechanism.name] = nearest_multiple(width, width_step)
        return MlpWidths(hidden, widths)

    def cost(self, site: LayerSpec) -> Cost:
        """Return the cost of a block's MLP, mechanisms included."""
        size, shape = self.size(site), site.shape
        biases = self.activation.fc_outputs * size.hidden + shape.n_embd
        dense = Cost(self._weights_per_unit(site) * size.hidden, biases * shape.bias)
        parts = (m.cost(size.hidden, size.widths[m.name], site) for m in self.built(site))
        return Cost.of((dense, *parts))

    def _weights_per_unit(self, site: LayerSpec) -> int:
        return (self.activation.fc_outputs + 1) * site.shape.n_embd

    def built_ratio(self, site: LayerSpec) -> float:
        """Return MLP parameters / attention parameters of a block, without biases."""
        return self.cost(site).weights / site.attention.cost(site.shape, site.block).weights

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
        width, what = site.shape.n_embd, ""
        if width < MIN_RATIO_N_EMBD:
            what = f"MLP_SIZING_RATIO: N_EMBD={width} is too small to keep the ratio within 1 %"
            what = f"{what} (expected N_EMBD >= {MIN_RATIO_N_EMBD})"
            fix = "set a larger N_EMBD, or MLP_SIZING_HIDDEN"
        elif abs((built := self.built_ratio(site)) / self.ratio - 1) > RATIO_TOLERANCE:
            what = f"MLP_RATIO: ratio unreachable in block {site.block}"
            what = f"{what} (expected {self.ratio}, got {built:.4f})"
            fix = "set another MLP_SHARE, MLP_RATIO or N_EMBD"
        if what:
            raise ConfigError(Problem(what, next=fix, code="config.ratio-unreachable"))
