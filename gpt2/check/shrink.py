"""A step small enough to train in a blink: the same symbols, smaller numbers.

Nothing is built by hand: the changed symbols go through ``Config.from_values`` like any others, so
every rule holds for the small step too, and it takes the code path of the large one.
"""

import math
from collections.abc import Iterable, Mapping

from gpt2.attention.nsa.options import NsaOptions
from gpt2.attention.options import PatternOptions
from gpt2.config import Config
from lib.binding import Value
from lib.errors import ConfigError

# First, middle and last block differ.
LAYERS = 3
HEADS = 4
# Ratio sizing rounds well from the first on; the others are taken where it does not.
WIDTHS = (96, 128, 160, 192, 256)
CONTEXT = 40
ITERATIONS = 6
# Of SGD at least: at Adam's rates it moves less in these iterations than fp32 can hold.
SGD_LEARNING_RATE = 0.1
# Optimizer and pruning events come on the first iterations of so many.
EVENTS = 3

# What a text of bytes on a CPU needs, whatever the step trains on.
_PLACE: dict[str, Value] = {
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
# Tokens back or in number, which keep their place between one and the whole context.
_POSITIONS = (
    "RECIPROCAL_WINDOW",
    "SLIDING_WINDOW",
    "NSA_WINDOW",
    "RA_CROSS_TOKEN_TOPK",
    "MLP_CROSS_TOKEN_TOPK",
)
# Widths that shrink with the model, to so many at least, and to so many times the model's at most;
# 0 asks for a default and stays.
_WIDTHS = {
    "MLP_HIDDEN": (8, 8),
    "LATENT_DIM": (8, 2),
    "MLP_ATTN_GATE_DIM": (2, 2),
    "MLP_CROSS_TOKEN_DIM": (2, 2),
    "NSA_PHI_HIDDEN": (8, 2),
}
# Strides of a block of native sparse attention, at most, and blocks that a query selects: so few
# that a check's few tokens have more.
_STRIDES = 2
_SELECTED = 4


def shrink(config: Config, among: Iterable[Config] = (), **changes: Value) -> Config:
    """The small form of ``config``, with ``changes`` on top.

    Windows and counts that differ ``among`` the configurations of a study stay different.

    ConfigError when no small width keeps the rules that the configured one keeps.
    """
    small = small_values(config, among) | changes
    refused: ConfigError | None = None
    for width in _widths(config):
        try:
            return Config.from_values(small | _dimensions(config, width) | changes)
        except ConfigError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def changed(config: Config, **changes: Value) -> Config:
    """``config`` with some symbols changed. ConfigError where that breaks a rule."""
    return Config.from_values({**config.values, **changes})


def small_values(config: Config, among: Iterable[Config] = ()) -> dict[str, Value]:
    """Every symbol; those that do not depend on the width are already small."""
    values: dict[str, Value] = dict(config.values) | _PLACE
    shape = config.model.shape
    values["N_LAYER"] = min(shape.n_layer, LAYERS)
    values["BLOCK_SIZE"] = context = min(shape.block_size, CONTEXT)
    peers = [c for c in (config, *among) if c.model.shape.block_size == shape.block_size]
    for name in _POSITIONS:
        fulls = {_number(peer.values, name) for peer in peers}
        values[name] = _places(fulls, shape.block_size, context)[_number(values, name)]
    # Kernels that a CPU has not, or not with dropout; this one is of the same form.
    lacks = ("efficient", "flash") if shape.dropout else ("efficient",)
    if values["ATTENTION_BACKEND"] in lacks:
        values["ATTENTION_BACKEND"] = "math"
    # The narrow type that a CPU has.
    if values["PRECISION"] == "fp16":
        values["PRECISION"] = "bf16"
    if values["OPTIMIZER"] == "sgd":
        values["LEARNING_RATE"] = str(max(SGD_LEARNING_RATE, float(values["LEARNING_RATE"])))
    return (
        values | _events(values) | _nsa(config.model.attention.pattern, shape.block_size, context)
    )


def _nsa(pattern: PatternOptions, full: int, context: int) -> dict[str, Value]:
    """Blocks of one stride or two, of one token each; selection takes all where it takes all of
    ``full`` tokens. Sizes that nothing needs stay 0."""
    if not isinstance(pattern, NsaOptions):
        return {}
    stride = max(1, pattern.stride)
    compress, select = (min(_STRIDES, n // stride) for n in (pattern.compress, pattern.select))
    count = min(_SELECTED, pattern.count)
    if pattern.selects_all(full):
        count = max(count, -(-context // select))
    return {
        "NSA_COMPRESS_BLOCK": compress,
        "NSA_COMPRESS_STRIDE": min(1, pattern.stride),
        "NSA_SELECT_BLOCK": select,
        "NSA_SELECT_COUNT": count,
    }


def _events(values: Mapping[str, Value]) -> dict[str, Value]:
    """Warm-ups, resets and prunings that happen within the iterations."""
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
    """Widths to try, the smallest first; a model that is narrow already keeps its own."""
    width = config.model.shape.n_embd
    return [*(w for w in WIDTHS if w < width), width]


def _dimensions(config: Config, width: int) -> dict[str, Value]:
    """Everything that goes with the width."""
    values, shape = config.values, config.model.shape
    found: dict[str, Value] = {"N_EMBD": width}
    if width < shape.n_embd:
        heads = min(shape.n_head, HEADS)
        found |= {"N_HEAD": heads, "N_KV_HEAD": _kv_heads(config, heads)}
    for name, (least, times) in _WIDTHS.items():
        full = _number(values, name)
        small = max(least, round(full * width / shape.n_embd)) if full else 0
        found[name] = min(small, times * width)
    return found


def _kv_heads(config: Config, heads: int) -> int:
    """One, all, or between them, as configured."""
    full = _number(config.values, "N_KV_HEAD")
    if full == 1 or heads < HEADS:
        return 1
    return heads if full == config.model.shape.n_head else heads // 2


def _places(fulls: Iterable[int], context: int, small: int) -> dict[int, int]:
    """Numbers of tokens in a small context: 0 and 1, and what reaches across it, still do.

    Between them a number keeps its place on a logarithmic scale, moved on where another has it,
    and back where the context ends; more numbers than places share the first.
    """
    found = {full: min(full, small) for full in fulls if full <= 1 or full >= context}
    inner = sorted(set(fulls) - found.keys())
    place = 1
    for full in inner:
        place = max(place + 1, round(small ** (math.log(full) / math.log(context))))
        found[full] = place
    last = small
    for full in reversed(inner):
        last = found[full] = max(2, min(last - 1, found[full]))
    return found


def _number(values: Mapping[str, Value], name: str) -> int:
    value = values[name]
    assert isinstance(value, int), (name, value)
    return value
