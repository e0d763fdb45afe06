"""A small form of a step that trains in a fraction of a second: same symbols, smaller numbers.

The changed symbols go through ``Config.from_values``, so that every rule applies to the small step
too, and the small step takes the same code path as the large one.
"""

import math
from collections.abc import Iterable, Mapping

from gpt2.attention.options import PatternOptions
from gpt2.config import Config
from gpt2.nsa.options import NsaOptions
from lib.config.field import SymbolValue
from lib.errors import ConfigError

# First, middle and last block differ.
LAYERS = 3
HEADS = 4
# Widths to try in order; the first usually satisfies ratio sizing despite rounding.
WIDTHS = (96, 128, 160, 192, 256)
CONTEXT = 40
ITERATIONS = 6
# Minimum for SGD: at Adam's rates, its updates in these iterations are below fp32 resolution.
SGD_LEARNING_RATE = 0.1
# Interval of optimizer and pruning events, in iterations.
EVENTS = 3

# Settings of a small run on byte tokens on a CPU.
_ENVIRONMENT: dict[str, SymbolValue] = {
    "MODEL_SIZE": "custom",
    "TOKENIZER": "byte",
    "DATASET": "custom",
    "DATASET_STAND_IN": False,
    "CUSTOM_PATH": "text",
    "CUSTOM_FORMAT": "bin",
    "DATA_DIR": "data",
    "EVAL_TOKENS": 64,
    "LOADER_WORKERS": 0,
    "DEVICE": "cpu",
    "CPU_THREADS": 1,
    "COMPILE": False,
    "MATMUL_PRECISION": "highest",
    "CUDNN_BENCHMARK": False,
    "EXPANDABLE_SEGMENTS": False,
    "WARMUP_ITERATIONS": 0,
    "GPUS": 1,
    "BUDGET": "iterations",
    "MAX_ITERS": ITERATIONS,
    "GLOBAL_BATCH": 2,
    "BATCH_SIZE": 1,
    "GRAD_ACCUMULATION": 2,
    "LOG_INTERVAL": 1,
    "EVAL_INTERVAL": 0,
    "CHECKPOINT_INTERVAL": 0,
    "SAMPLE_TOKENS": 0,
    "RUN_TIME_LIMIT_SECONDS": 0,
}
# Window sizes and counts, scaled so that their order relative to the context is preserved.
_POSITIONS = (
    "RECIPROCAL_WINDOW",
    "SLIDING_WINDOW",
    "NSA_WINDOW",
    "RA_CROSS_TOKEN_TOPK",
    "MLP_CROSS_TOKEN_TOPK",
)
# Widths that shrink with the model: minimum, and maximum as a multiple of the model's width; 0
# selects a default and stays 0.
_WIDTHS = {
    "MLP_HIDDEN": (8, 8),
    "LATENT_DIM": (8, 2),
    "MLP_ATTN_GATE_DIM": (2, 2),
    "MLP_CROSS_TOKEN_DIM": (2, 2),
    "NSA_PHI_HIDDEN": (8, 2),
}
# Maximum strides per block of native sparse attention, and maximum blocks selected by a query, so
# that the few tokens of a check have more blocks than that.
_MAX_STRIDES = 2
_MAX_SELECTED = 4


def small_config(config: Config, among: Iterable[Config] = (), **changes: SymbolValue) -> Config:
    """Return the small form of ``config``, with ``changes`` on top.

    Windows and counts that differ ``among`` the configurations of a study stay different. Raises
    ConfigError if no small width satisfies the rules that the configured width satisfies.
    """
    small = small_values(config, among) | changes
    first_error: ConfigError | None = None
    for width in _widths(config):
        try:
            return Config.from_values(small | _dimensions(config, width) | changes)
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def with_changes(config: Config, **changes: SymbolValue) -> Config:
    """Return ``config`` with some symbols changed.

    Raises ConfigError if that violates a rule.
    """
    return Config.from_values({**config.values, **changes})


def small_values(config: Config, among: Iterable[Config] = ()) -> dict[str, SymbolValue]:
    """Return the value of every symbol; those that do not depend on the width are small."""
    values: dict[str, SymbolValue] = dict(config.values) | _ENVIRONMENT
    shape = config.model.shape
    values["N_LAYER"] = min(shape.n_layer, LAYERS)
    values["BLOCK_SIZE"] = context = min(shape.block_size, CONTEXT)
    peers = [c for c in (config, *among) if c.model.shape.block_size == shape.block_size]
    for name in _POSITIONS:
        fulls = {_number(peer.values, name) for peer in peers}
        values[name] = _small_positions(fulls, shape.block_size, context)[_number(values, name)]
    # A CPU lacks these kernels, or their dropout; the math kernel computes the same form.
    unsupported = ("efficient", "flash") if shape.dropout else ("efficient",)
    if values["ATTENTION_BACKEND"] in unsupported:
        values["ATTENTION_BACKEND"] = "math"
    # The narrow type that a CPU supports.
    if values["PRECISION"] == "fp16":
        values["PRECISION"] = "bf16"
    if values["OPTIMIZER"] == "sgd":
        values["LEARNING_RATE"] = str(max(SGD_LEARNING_RATE, float(values["LEARNING_RATE"])))
    return (
        values | _events(values) | _nsa(config.model.attention.pattern, shape.block_size, context)
    )


def _nsa(pattern: PatternOptions, full: int, context: int) -> dict[str, SymbolValue]:
    """Return block sizes of one or two strides, with a stride of one token.

    Selection takes all blocks if it does for ``full`` tokens. Unused sizes stay 0.
    """
    if not isinstance(pattern, NsaOptions):
        return {}
    stride = max(1, pattern.stride)
    compress, select = (min(_MAX_STRIDES, n // stride) for n in (pattern.compress, pattern.select))
    count = min(_MAX_SELECTED, pattern.count)
    if pattern.selects_all(full):
        count = max(count, -(-context // select))
    return {
        "NSA_COMPRESS_BLOCK": compress,
        "NSA_COMPRESS_STRIDE": min(1, pattern.stride),
        "NSA_SELECT_BLOCK": select,
        "NSA_SELECT_COUNT": count,
    }


def _events(values: Mapping[str, SymbolValue]) -> dict[str, SymbolValue]:
    """Return warm-ups, resets and prunings that happen within the iterations."""
    interval = EVENTS
    return {
        "WARMUP_STEPS": min(_number(values, "WARMUP_STEPS"), 2),
        "PRUNING_FREQUENCY": 1,
        "SPAM_INTERVAL": interval,
        "SPAM_CLIP_DELAY": min(_number(values, "SPAM_CLIP_DELAY"), 2),
        "SPAM_SPIKE_WINDOW": min(_number(values, "SPAM_SPIKE_WINDOW"), 3),
        "SPAM_WARMUP_STEPS": min(_number(values, "SPAM_WARMUP_STEPS"), interval - 1),
    }


def _widths(config: Config) -> list[int]:
    """Return the widths to try, smallest first; a narrow model only has its own."""
    width = config.model.shape.n_embd
    return [*(w for w in WIDTHS if w < width), width]


def _dimensions(config: Config, width: int) -> dict[str, SymbolValue]:
    """Return all symbols that depend on the width."""
    values, shape = config.values, config.model.shape
    dimensions: dict[str, SymbolValue] = {"N_EMBD": width}
    if width < shape.n_embd:
        heads = min(shape.n_head, HEADS)
        dimensions |= {"N_HEAD": heads, "N_KV_HEAD": _kv_heads(config, heads)}
    for name, (low, times) in _WIDTHS.items():
        full = _number(values, name)
        small = max(low, round(full * width / shape.n_embd)) if full else 0
        dimensions[name] = min(small, times * width)
    return dimensions


def _kv_heads(config: Config, heads: int) -> int:
    """Return one, all or half of the heads, as configured."""
    full = _number(config.values, "N_KV_HEAD")
    if full == 1 or heads < HEADS:
        return 1
    return heads if full == config.model.shape.n_head else heads // 2


def _small_positions(fulls: Iterable[int], context: int, small: int) -> dict[int, int]:
    """Map token counts to a small context; 0, 1, and the whole context keep their meaning.

    Other counts keep their position on a logarithmic scale, shifted up to stay distinct, and down
    at the end of the context. Counts beyond the available positions share the first.
    """
    positions = {full: min(full, small) for full in fulls if full <= 1 or full >= context}
    inner = sorted(set(fulls) - positions.keys())
    position = 1
    for full in inner:
        position = max(position + 1, round(small ** (math.log(full) / math.log(context))))
        positions[full] = position
    last = small
    for full in reversed(inner):
        last = positions[full] = max(2, min(last - 1, positions[full]))
    return positions


def _number(values: Mapping[str, SymbolValue], name: str) -> int:
    value = values[name]
    assert isinstance(value, int), (name, value)
    return value
