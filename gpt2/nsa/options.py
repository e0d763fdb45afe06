"""Options of native sparse attention (Yuan et al. 2025, arXiv 2502.11089)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import ClassVar

from gpt2.attention.options import ConfigNote, PatternOptions, ProjectionOptions
from gpt2.shape import Cost, ModelShape
from lib.config.field import kconfig_field
from lib.config.small_form import SmallForm, scale_tokens, scale_width
from lib.errors import ConfigError, PreflightError, Problem

# The order of gates, separate keys and values, and head outputs.
BRANCHES = ("compressed", "selected", "window")


# Small form: a stride of one token and blocks of one or two strides, so that the few tokens of a
# check have more blocks than a query selects. Unused sizes stay 0. A form with the configured context
# keeps all sizes.
_MAX_STRIDES = 2
_MAX_SELECTED = 4


def _small_stride(form: SmallForm, name: str) -> int:
    return form.number(name) if form.keeps_context else min(1, form.number(name))


def _small_block(form: SmallForm, name: str) -> int:
    if form.keeps_context:
        return form.number(name)
    return min(_MAX_STRIDES, form.number(name) // max(1, form.number("NSA_COMPRESS_STRIDE")))


def _small_count(form: SmallForm, name: str) -> int:
    count, select = form.number(name), form.number("NSA_SELECT_BLOCK")
    if form.keeps_context:
        return count
    small = min(_MAX_SELECTED, count)
    if form.values["NSA_BRANCH_SELECTED"] and count * select >= form.full_context:
        return max(small, -(-form.context // _small_block(form, "NSA_SELECT_BLOCK")))
    return small


@dataclass(frozen=True)
class NsaOptions(PatternOptions):
    """Options of native sparse attention; unused sizes are 0.

    Compressed block i covers the tokens [i·stride, i·stride + compress), selection block j
    [j·select, (j+1)·select). Raises ConfigError if sizes are incompatible or no branch is enabled.
    """

    name: ClassVar[str] = "nsa"
    attends: ClassVar[bool] = True
    data_dependent: ClassVar[bool] = True

    compress: int = kconfig_field("NSA_COMPRESS_BLOCK", small=_small_block)
    stride: int = kconfig_field("NSA_COMPRESS_STRIDE", small=_small_stride)
    select: int = kconfig_field("NSA_SELECT_BLOCK", small=_small_block)
    # Selected blocks per token, including the forced ones (first, own and previous block).
    count: int = kconfig_field("NSA_SELECT_COUNT", small=_small_count)
    window: int = kconfig_field("NSA_WINDOW", small=scale_tokens)
    shared_kv: bool = kconfig_field("NSA_SHARED_KV")
    # mean, or mlp: the mean plus an MLP of the block.
    phi: str = kconfig_field("NSA_PHI")
    hidden: int = kconfig_field("NSA_PHI_HIDDEN", small=scale_width(8, 2))
    # sigmoid or softmax
    gate: str = kconfig_field("NSA_GATE")
    # score or random
    select_by: str = kconfig_field("NSA_SELECT_BY")
    branch_compressed: bool = kconfig_field("NSA_BRANCH_COMPRESSED")
    branch_selected: bool = kconfig_field("NSA_BRANCH_SELECTED")
    branch_window: bool = kconfig_field("NSA_BRANCH_WINDOW")
    # auto, blocks, gather or triton.
    backend: str = kconfig_field("NSA_BACKEND", form=True)
    # Ranges of the gather backend: lists, merged, or adaptive (merged from ranges_min tokens on).
    ranges: str = kconfig_field("NSA_RANGES", form=True)
    ranges_min: int = kconfig_field("NSA_RANGES_MIN_S", form=True)

    def __post_init__(self) -> None:
        wrong = []
        if not self.branches:
            wrong.append(
                "NSA_BRANCH_WINDOW: no branch is enabled (expected at least one, got n for all)"
            )
        for name, size in (("COMPRESS", self.compress), ("SELECT", self.select)):
            if self.stride and size % self.stride:
                what = f"expected a multiple of NSA_COMPRESS_STRIDE={self.stride}, got {size}"
                wrong.append(f"NSA_{name}_BLOCK: not a multiple of the stride ({what})")
        if self.ranks and self.compress > self.select:
            what = f"expected at most NSA_SELECT_BLOCK={self.select}, got {self.compress}"
            wrong.append(f"NSA_COMPRESS_BLOCK: larger than a selection block ({what})")
        if wrong:
            raise ConfigError(*(Problem(what, code="config.conflict") for what in wrong))

    def starts(self, shape: ModelShape) -> Mapping[str, float | Sequence[float]]:
        """Return that the gates of a head start at σ(b) = 1/c, so that their sum is a mean."""
        count = len(self.branches)
        return {"gates.bias": -math.log(count - 1)} if count > 1 else {}

    @property
    def branches(self) -> tuple[str, ...]:
        flags = (self.branch_compressed, self.branch_selected, self.branch_window)
        return tuple(name for name, enabled in zip(BRANCHES, flags, strict=True) if enabled)

    @property
    def owner(self) -> str:
        """Return the branch that uses the keys and values of the projection."""
        return "selected" if self.branch_selected else self.branches[0]

    @property
    def ranks(self) -> bool:
        return self.branch_selected and self.select_by == "score"

    @property
    def compresses(self) -> bool:
        """Return whether compressed keys are computed, be it only to rank blocks."""
        return self.branch_compressed or self.ranks

    @property
    def learns_phi(self) -> bool:
        return self.branch_compressed and self.phi == "mlp"

    def compressed(self, tokens: int) -> int:
        """Return the number of compressed blocks complete after ``tokens`` tokens."""
        return max(0, (tokens - self.compress) // self.stride + 1) if self.compresses else 0

    def selects_all(self, length: int) -> bool:
        """Return whether every query in ``length`` tokens selects all earlier blocks."""
        return self.branch_selected and self.count * self.select >= length

    def pairs(self, length: int) -> tuple[int, int, int]:
        """Return the query-key pairs per head: compressed, if only to rank, selected, window."""
        compressed = 0
        if self.compresses:
            complete = max(0, length - self.compress + 1)
            steps, rest = divmod(complete, self.stride)
            compressed = complete + self.stride * steps * (steps - 1) // 2 + steps * rest
        selected = selected_pairs(length, self.select, self.count) if self.branch_selected else 0
        window = min(self.window, length) if self.branch_window else 0
        return compressed, selected, window * (window + 1) // 2 + (length - window) * window

    def most_keys(self, length: int) -> int:
        """Return the keys of the last query in the branch where it has most."""
        taken = self.branch_selected * self.count * self.select, self.branch_window * self.window
        compressed = self.branch_compressed * self.compressed(length)
        return max(compressed, min(length, max(taken)))

    def mean_keys(self, length: int) -> float:
        return sum(self.pairs(length)) / length

    def notes(self, shape: ModelShape) -> list[ConfigNote]:
        """Return notes on the cost relative to full attention and on ineffective selection."""
        length, notes = shape.block_size, []
        if self.selects_all(length):
            sizes = f"NSA_SELECT_COUNT={self.count} x NSA_SELECT_BLOCK={self.select}"
            what = f"selection takes every block: {sizes} >= BLOCK_SIZE={length}"
            notes.append(ConfigNote(what, warns=True))
        ratio = (length + 1) / 2 / self.mean_keys(length)
        text, wasteful = f"query-key pairs, full attention / NSA: {ratio:.2f}", ratio < 1
        less = ", so full attention does less" * wasteful
        return [*notes, ConfigNote(text + less, warns=wasteful)]

    def check(self, shape: ModelShape) -> None:
        """Raise ConfigError if the options do not fit the model shape."""
        problems = []
        if shape.dropout:
            what = "DROPOUT: not supported by ATTENTION_PATTERN_NSA"
            what = f"{what} (expected 0.0, got {shape.dropout})"
            problems.append(Problem(what, next="type: SET=DROPOUT=0.0", code="config.conflict"))
        if self.compress > shape.block_size:
            what = f"expected at most BLOCK_SIZE={shape.block_size}, got {self.compress}"
            what = f"NSA_COMPRESS_BLOCK: no block is ever complete ({what})"
            problems.append(Problem(what, code="config.conflict"))
        elif self.most_keys(shape.block_size) == 1:
            what = "ATTENTION_PATTERN_NSA: no query has a choice, so queries and keys learn nothing"
            what = f"{what} (expected a branch of two keys or more, got one of one key)"
            fix = "enable a branch, or decrease NSA_COMPRESS_BLOCK"
            problems.append(Problem(what, next=fix, code="config.conflict"))
        if self.select_by == "random" and self.selects_all(shape.block_size):
            sizes = f"{self.count} x NSA_SELECT_BLOCK={self.select} >= BLOCK_SIZE"
            what = f"NSA_SELECT_BY: random, but selection takes every block: {sizes}"
            count = (shape.block_size - 1) // self.select
            fix = f"type: SET=NSA_SELECT_COUNT={count}, or a larger BLOCK_SIZE"
            if count < 3:
                fix = "decrease NSA_SELECT_BLOCK or increase BLOCK_SIZE"
            what = f"{what}={shape.block_size}"
            problems.append(Problem(what, next=fix, code="config.conflict"))
        if problems:
            raise ConfigError(*problems)

    def cost(self, shape: ModelShape, projection: ProjectionOptions) -> Cost:
        """Return the cost beyond the attention products of ``mean_keys``.

        Weights are the keys and values of branches other than the owner, two MLPs, and the gates of
        several branches. An MLP runs once per block and key head, not per token. Keys used for
        ranking alone have no product with values, so this part is subtracted.
        """
        count, length = len(self.branches), shape.block_size
        separate = 0 if self.shared_kv else (count - 1) * projection.expanded_numbers(shape)
        gates = count * shape.n_head if count > 1 else 0
        phi = positions = 0
        if self.learns_phi:
            phi = 2 * self.hidden * (self.compress + 1) * shape.head_dim
            positions = 2 * self.compress * shape.head_dim
        blocks = self.compressed(length) / length
        ranked = 0 if self.branch_compressed else self.pairs(length)[0]
        flops = 2 * phi * projection.kv_heads(shape) * blocks - 2 * phi
        return Cost(
            (separate + gates) * shape.n_embd + phi,
            separate * shape.bias + positions + gates,
            flops - 2 * shape.n_embd * ranked / length,
        )

    @property
    def fuses(self) -> bool:
        """Return whether a GPU runs the fused kernels."""
        return self.backend in ("", "auto", "triton")

    def for_any_device(self) -> "NsaOptions":
        """Return the options with the backend that suits the device."""
        return replace(self, backend=self.backend and "auto", ranges="", ranges_min=0)


def selected_pairs(length: int, select: int, count: int) -> int:
    """Return the selected query-key pairs of a head; only the query's own block is incomplete."""
    blocks, rest = divmod(length, select)
    growing = min(blocks, count)
    # Earlier blocks selected by the queries of a block: 0, 1, 2 … up to count − 1.
    before = growing * (growing - 1) // 2 + (blocks - growing) * (count - 1)
    whole = before * select + rest * min(count - 1, blocks)
    own = blocks * (select * (select + 1) // 2) + rest * (rest + 1) // 2
    return whole * select + own


def resolve_backend(options: NsaOptions, device: str) -> str:
    """Return blocks, gather or triton for a device; without the selected branch triton or nothing.

    Raises PreflightError if the configured backend cannot run there.
    """
    if options.backend in ("auto", ""):
        if device == "cuda" and find_spec("triton"):
            return "triton"
        return options.backend and ("gather" if device == "cuda" else "blocks")
    devices = {"gather": ("cpu", "cuda"), "triton": ("cuda",)}.get(options.backend, (device,))
    if device not in devices:
        expected = " or ".join(devices)
        what = f"NSA_BACKEND: {options.backend} cannot run on {device!r} (expected {expected})"
        fix = "type: SET=NSA_BACKEND_BLOCKS=y"
        raise PreflightError(Problem(what, next=fix, code="gpu.unsupported"))
    if options.backend == "triton" and not find_spec("triton"):
        what = "NSA_BACKEND: the package triton is missing"
        fix = "type: SET=NSA_BACKEND_GATHER=y, or install torch for the GPU"
        raise PreflightError(Problem(what, next=fix, code="env.missing-package"))
    return options.backend


def merges_ranges(options: NsaOptions, length: int) -> bool:
    """Return whether gather merges adjacent blocks of ``length`` tokens into one range."""
    if options.ranges == "adaptive":
        return length >= options.ranges_min
    return options.ranges == "merged"
