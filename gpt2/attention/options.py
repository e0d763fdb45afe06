"""Options of the components of attention, with their costs; imports no torch.

The module of each class of options is in ``MODULES`` of ``attention.py``, its formula in
``REFERENCES`` of ``reference.py``. C n_embd, N heads, K key/value heads, H head dim, R latent dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gpt2.shape import Cost, ModelShape, nearest_multiple
from lib.config.field import SymbolValue, kconfig_field
from lib.config.small_form import SmallForm, scale_tokens, scale_width

# Largest k of the Triton kernels, which sort a tile of columns.
MAX_TILE_TOPK = 32


class PartOptions:
    """Options of a component of attention or of the MLP."""

    name: ClassVar[str]
    # Values of symbols with which the built component has no effect; empty: it always has one.
    off: ClassVar[Mapping[str, SymbolValue]] = {}

    def starts(self, shape: ModelShape) -> Mapping[str, float | Sequence[float]]:
        """Return the initial values of vectors by the parameter's name in the component.

        A vector that is not among them starts at the option of its name, or at 0.
        """
        return {}


class PositionOptions(PartOptions):
    """Options of a position encoding."""

    # True if queries and keys are rotated instead of adding position embeddings to x.
    rotates: ClassVar[bool] = False


class ProjectionOptions(PartOptions):
    """Options of the query, key and value projection, by default of columns in the order q, k, v."""

    def kv_heads(self, shape: ModelShape) -> int:
        return shape.n_head

    def cost(self, shape: ModelShape) -> Cost:
        """Return the cost without attention scores and output projection."""
        columns = shape.n_embd + self.expanded_numbers(shape)
        return Cost(shape.n_embd * columns, columns * shape.bias)

    def expanded_numbers(self, shape: ModelShape) -> int:
        """Return the elements of keys and values per token: 2·K·H."""
        return 2 * self.kv_heads(shape) * shape.head_dim


@dataclass(frozen=True)
class ConfigNote:
    """Note or warning about a configuration, shown before a run starts."""

    text: str
    warns: bool = False

    @property
    def tag(self) -> str:
        return "WARN" if self.warns else "NOTE"


class PatternOptions(PartOptions):
    """Options of a pattern: which earlier tokens a token sees. By default the last ``width``."""

    # True if the module is a ``CustomAttention``: a kernel that replaces SDPA and the row engine.
    attends: ClassVar[bool] = False
    # True if the order of sums depends on the data, so that equal values may differ in bits.
    data_dependent: ClassVar[bool] = False

    @property
    def width(self) -> int | None:
        """Return w, so that token i sees max(0, i − w + 1) ≤ j ≤ i; None: all of j ≤ i."""
        return None

    def mean_keys(self, length: int) -> float:
        """Return the number of keys per query, averaged over ``length`` tokens."""
        width = min(self.width or length, length)
        return (width * (width + 1) / 2 + (length - width) * width) / length

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError if the pattern does not fit the shape."""

    def for_any_device(self) -> "PatternOptions":
        """Return the options without the choice of a kernel, which another machine may lack."""
        return self

    def notes(self, shape: ModelShape) -> list[ConfigNote]:
        return []

    def cost(self, shape: ModelShape, projection: ProjectionOptions) -> Cost:
        """Return the cost beyond the attention products of ``mean_keys``."""
        return Cost()


class TransformOptions(PartOptions):
    """Options of a transformation of queries and keys per head, before positions are applied."""

    def cost(self, shape: ModelShape, numbers: int) -> Cost:
        """Return the cost for ``numbers`` elements of q and k per token."""
        raise NotImplementedError


class TermOptions(PartOptions):
    """Options of a score term."""

    @property
    def lacks_triton(self) -> str:
        """Return the features that the Triton kernels do not support ("" if none)."""
        return ""

    def cost(self, shape: ModelShape, keys: float) -> Cost:
        """Return the added cost with ``keys`` visible keys."""
        raise NotImplementedError


class GateOptions(TermOptions):
    """Options of a gate."""

    @property
    def scales_scores(self) -> bool:
        """Return whether the gate scales the scores of a row instead of its head output."""
        raise NotImplementedError


class ValueMixOptions(PartOptions):
    """Options of a mix of the values of each later block with those of the first block."""

    def cost(self, shape: ModelShape, numbers: int) -> Cost:
        """Return the cost in a later block for ``numbers`` elements of v per token."""
        raise NotImplementedError


class SinkOptions(PartOptions):
    """Options of a weight in every row beside those of the keys, which has no value."""

    def cost(self, shape: ModelShape) -> Cost:
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionWeightsOptions:
    """Attention weights that an MLP reads: the mean over heads of the rows, sparsified.

    ``sparsity``: topk keeps the k largest weights of a row (and ties with the k-th); rms weights of
    at least ``tau`` times the root mean square over the visible tokens of the row; none all
    weights. With ``detach`` no gradient flows back into attention.
    """

    sparsity: str
    topk: int
    tau: float
    detach: bool


@dataclass(frozen=True)
class LearnedOptions(PositionOptions):
    """Options of GPT-2's ``wpe``: one embedding per position."""

    name: ClassVar[str] = "learned"


@dataclass(frozen=True)
class RopeOptions(PositionOptions):
    """Options of RoPE (Su et al. 2021, arXiv 2104.09864): at token t, pair j of a head is rotated
    by t · ``base``^(−2j/H).
    """

    name: ClassVar[str] = "rope"
    rotates: ClassVar[bool] = True

    base: float = kconfig_field("ROPE_BASE", low=2.0, high=1e9)


@dataclass(frozen=True)
class DenseOptions(ProjectionOptions):
    """Options of GPT-2's ``c_attn``: one C → 3C matrix in the order q, k, v."""

    name: ClassVar[str] = "dense"


def _small_kv_heads(form: SmallForm, name: str) -> int:
    full = form.number(name)
    if form.width == form.full_width:
        return full
    if full == 1 or form.heads < 4:
        return 1
    return form.heads if full == form.number("N_HEAD") else form.heads // 2


@dataclass(frozen=True)
class GroupedOptions(ProjectionOptions):
    """Options of grouped-query attention, ``n_kv_head`` shared heads (arXiv 2305.13245)."""

    name: ClassVar[str] = "grouped"

    n_kv_head: int = kconfig_field("N_KV_HEAD", small=_small_kv_heads)

    def kv_heads(self, shape: ModelShape) -> int:
        return self.n_kv_head


_scale_latent = scale_width(8, 2)


def _small_latent(form: SmallForm, name: str) -> int:
    """Return a width that the small form's heads divide only if the configured heads do."""
    scaled = int(_scale_latent(form, name))
    full = form.number(name) or default_latent(form.full_width)
    if form.width == form.full_width or full % form.number("N_HEAD") == 0:
        return scaled
    small = scaled or default_latent(form.width)
    return small + form.heads // 2 if small % form.heads == 0 else small


def default_latent(n_embd: int) -> int:
    """Return the width for LATENT_DIM=0: C/6, rounded to a multiple of 8."""
    return nearest_multiple(n_embd / 6, 8)


@dataclass(frozen=True)
class LatentOptions(ProjectionOptions):
    """Options of the latent projection, after multi-head latent attention (arXiv 2405.04434).

    c_k = x W_dk and c_v = x W_dv have width R and are shared by the heads; per head k_h = c_k K_h
    and v_h = c_v U_h. Neither positions nor biases are used.
    """

    name: ClassVar[str] = "latent"

    latent_dim: int = kconfig_field("LATENT_DIM", small=_small_latent)
    # One K and one U for all heads instead of one each.
    shared_expansion: bool = kconfig_field("LATENT_SHARED_EXPANSION")

    def width(self, shape: ModelShape) -> int:
        return self.latent_dim or default_latent(shape.n_embd)

    def cost(self, shape: ModelShape) -> Cost:
        """Return C² + 2CR down + 2·N·R·H = 2CR up (2RH if the heads share K and U), no biases."""
        expanded = shape.head_dim if self.shared_expansion else shape.n_embd
        return Cost(shape.n_embd**2 + 2 * self.width(shape) * (shape.n_embd + expanded))


@dataclass(frozen=True)
class FullOptions(PatternOptions):
    """Options of the full causal pattern: token i sees j ≤ i."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True)
class SlidingOptions(PatternOptions):
    """Options of the sliding-window pattern: ``window`` visible tokens, including the last."""

    name: ClassVar[str] = "sliding"

    window: int = kconfig_field("SLIDING_WINDOW", small=scale_tokens)

    @property
    def width(self) -> int:
        return self.window


@dataclass(frozen=True)
class QkNormOptions(TransformOptions):
    """Options of QK-norm: x ← g ⊙ x / √(mean x² + 1e-6) per head, g of H elements for q and for k.

    Henry et al. 2020, arXiv 2010.04245; per head and with RMSNorm as in Qwen3, arXiv 2505.09388.
    """

    name: ClassVar[str] = "qk_norm"

    def starts(self, shape: ModelShape) -> Mapping[str, float | Sequence[float]]:
        return {"q_scale": 1.0, "k_scale": 1.0}

    def cost(self, shape: ModelShape, numbers: int) -> Cost:
        """Return two scales, shared by the heads; a square, a sum and two products per element."""
        return Cost(vectors=2 * shape.head_dim, other_flops=4 * numbers)


@dataclass(frozen=True)
class ReciprocalOptions(TermOptions):
    """Options of reciprocal attention: s_ij ← s_ij + α (q_j · k_i)/√H for i − W ≤ j ≤ i.

    α = 0 disables it (scores are unchanged).
    """

    name: ClassVar[str] = "reciprocal"
    # A learnable α would start at 0 and be trained.
    off: ClassVar[Mapping[str, SymbolValue]] = {
        "RECIPROCAL_ALPHA": "0.0",
        "RECIPROCAL_LEARNABLE": False,
    }

    alpha: float = kconfig_field("RECIPROCAL_ALPHA", low=0.0, high=2.0)
    # W: the band reaches this many tokens back.
    window: int = kconfig_field("RECIPROCAL_WINDOW", small=scale_tokens)
    # One learnable α per head, starting at ``alpha``.
    learnable: bool = kconfig_field("RECIPROCAL_LEARNABLE")

    def cost(self, shape: ModelShape, keys: float) -> Cost:
        """Return the learnable α, and one more dot product of width C per key of the band."""
        alphas = shape.n_head if self.learnable else 0
        return Cost(vectors=alphas, other_flops=2 * shape.n_embd * min(self.window + 1, keys))


@dataclass(frozen=True)
class AttentionSinkOptions(SinkOptions):
    """Options of a logit b per head beside the scores: p_ij = exp(s_ij) / (exp(b_h) + Σ_j exp(s_ij)).

    Softmax off by one (Miller 2023) with a learnable bias, as in gpt-oss (2025), against the sinks
    of Xiao et al. 2023, arXiv 2309.17453.
    """

    name: ClassVar[str] = "attention_sink"

    def cost(self, shape: ModelShape) -> Cost:
        """Return the logits, and an exponential and a sum per row."""
        return Cost(vectors=shape.n_head, other_flops=2 * shape.n_head)


@dataclass(frozen=True)
class ValueResidualOptions(ValueMixOptions):
    """Options of the values λ v + (1 − λ) v₁ of later blocks, v₁ those of the first block.

    Zhou et al. 2024, arXiv 2410.17897, whose two learnable factors sum to 1 here.
    λ = 1 disables it.
    """

    name: ClassVar[str] = "value_residual"
    # A learnable λ would start at 1 and be trained.
    off: ClassVar[Mapping[str, SymbolValue]] = {
        "VALUE_RESIDUAL_SHARE": "1.0",
        "VALUE_RESIDUAL_LEARNABLE": False,
    }

    share: float = kconfig_field("VALUE_RESIDUAL_SHARE", low=0.0, high=1.0)
    # One learnable λ per later block, starting at ``share``.
    learnable: bool = kconfig_field("VALUE_RESIDUAL_LEARNABLE")

    def cost(self, shape: ModelShape, numbers: int) -> Cost:
        """Return λ, and two products and a sum per element."""
        return Cost(vectors=int(self.learnable), other_flops=3 * numbers)


@dataclass(frozen=True)
class RaCrossTokenOptions(GateOptions):
    """Options of the cross-token gate: g = σ(scale_h · statistic + bias_h) per row of weights.

    Rows are scaled by (1 − α) + α g; α = 0 disables it.

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
        many = self.mode == "topk" and self.topk > MAX_TILE_TOPK
        return f"RA_CROSS_TOKEN_TOPK={self.topk} (maximum {MAX_TILE_TOPK})" if many else ""

    def cost(self, shape: ModelShape, keys: float) -> Cost:
        """Return a scale and a bias per head, and about one FLOP per weight of each softmax."""
        softmaxes = 2 if self.scales_scores else 1
        return Cost(vectors=2 * shape.n_head, other_flops=softmaxes * shape.n_head * keys)

    @property
    def scales_scores(self) -> bool:
        return self.apply == "weights"
