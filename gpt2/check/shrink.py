"""A small form of a step that trains in a fraction of a second: same symbols, smaller numbers.

Each field bound to a symbol declares the rule of its small value (``lib/config/small_form.py``).
"""

import contextlib
from collections.abc import Callable, Iterable

from gpt2.check.fields import fields_by_symbol
from gpt2.config import Config
from lib.config.field import SymbolValue
from lib.config.small_form import SmallForm
from lib.errors import ConfigError

# First, middle and last block differ.
LAYERS = 3
HEADS = 4
# Widths to try in order; the first usually satisfies ratio sizing despite rounding.
WIDTHS = (96, 128, 160, 192, 256)
CONTEXT = 40
ITERATIONS = 6
# Tokens and heads of the long form.
LONG_CONTEXT = 1024
LONG_HEADS = 2

NO_DROPOUT: dict[str, SymbolValue] = {"DROPOUT": "0.0", "LORA_DROPOUT": "0.0"}
# Settings of a small run on byte tokens on a CPU.
_ENVIRONMENT: dict[str, SymbolValue] = {
    "MODEL_SIZE": "custom",
    "TOKENIZER": "byte",
    "DATASET": "custom",
    "DATASET_STAND_IN": False,
    "CUSTOM_PATH": "text/train.jsonl",
    "CUSTOM_VAL_PATH": "text/val.jsonl",
    "CUSTOM_FORMAT": "jsonl",
    "CUSTOM_TEXT_FIELD": "text",
    "DATA_DIR": "data",
    # Weights of the configured size do not fit; a preflight compares them with the model.
    "INIT_FROM": "",
    "EVAL_TOKENS": 150,
    "EVAL_DOCUMENTS": 0,
    "LOADER_WORKERS": 0,
    "DEVICE": "cpu",
    "CPU_THREADS": 1,
    "COMPILE": False,
    "MATMUL_PRECISION": "highest",
    "CUDNN_BENCHMARK": False,
    "EXPANDABLE_SEGMENTS": False,
    "WARMUP_ITERATIONS": 0,
    "GPUS": 1,
    "DATA_PARALLEL": "ddp",
    "BUDGET": "iterations",
    "MAX_ITERS": ITERATIONS,
    "GLOBAL_BATCH": 2,
    # One pass of two rows takes little more time than one of a single row; steps accumulates itself.
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 1,
    "LOG_INTERVAL": 1,
    "EVAL_INTERVAL": 0,
    "CHECKPOINT_INTERVAL": 0,
    "SAMPLE_TOKENS": 0,
    "RUN_TIME_LIMIT_SECONDS": 0,
}


def small_config(config: Config, among: Iterable[Config] = (), **changes: SymbolValue) -> Config:
    """Return the small form of ``config``, with ``changes`` on top.

    Windows and counts that differ ``among`` the configurations of a study stay different. Raises
    ConfigError if no small width satisfies the rules that the configured width satisfies.
    """
    among = list(among)
    return _first_valid(config, lambda width: _small_values(config, among, width) | changes)


def long_config(config: Config) -> Config:
    """Return one small block of ``config`` with its own context and its own numbers of tokens.

    Windows, counts and block sizes are the configured ones. A context of more than 1,024 tokens is
    cut to 1,024, unless a rule requires the whole context. The block is a deterministic function in
    fp32, with an MLP of GPT-2's width, or of the configured width if that is larger: a small block
    may not reach the size of a configured ratio or number of parameters, and a latent may be wider
    than GPT-2's MLP. Raises ConfigError like ``small_config``.
    """
    shape = config.model.shape
    full = shape.block_size
    hidden = max(4 * shape.n_embd, *config.model.hidden_widths())
    form: dict[str, SymbolValue] = {"N_LAYER": 1, "PRECISION": "fp32", **NO_DROPOUT}
    # The MLP is sized by its hidden width. If it is configured by its ratio, the widths of its
    # mechanisms are derived, and their symbols are 0: take the widths that the mechanisms declare.
    form |= {
        symbol: width
        for part in config.model.mlp.mechanisms
        for symbol, width in part.off.items()
        if config.values[symbol] == 0
    }

    def at(context: int) -> Config:
        cut = with_changes(config, BLOCK_SIZE=context, MLP_SIZING="hidden", MLP_HIDDEN=hidden)
        return _first_valid(
            cut, lambda width: _small_values(cut, (), width, context, LONG_HEADS) | form
        )

    try:
        return at(min(full, LONG_CONTEXT))
    except ConfigError:
        return at(full)


def _first_valid(config: Config, values: Callable[[int], dict[str, SymbolValue]]) -> Config:
    """Return the configuration of the first width, smallest first, that satisfies the rules."""
    first_error: ConfigError | None = None
    full = config.model.shape.n_embd
    # Also wider ones: with fewer blocks or less context, rounding may miss a narrow model's size.
    for width in sorted({*WIDTHS, full}):
        try:
            return Config.from_values(values(width))
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def with_changes(config: Config, **changes: SymbolValue) -> Config:
    """Return ``config`` with some symbols changed. Raises ConfigError if that violates a rule."""
    return Config.from_values({**config.values, **changes})


def with_scaled_floats(config: Config, symbols: Iterable[str], factor: float) -> Config:
    """Return ``config`` with the floats among ``symbols`` scaled, as far as the rules allow."""
    fields = fields_by_symbol()
    # Without a text, the setting does not apply.
    scaled = {
        name: repr(float(str(config.values[name])) * factor)
        for name in symbols
        if fields[name].kind is float and config.values.get(name)
    }
    # All together: a limit may be another of them.
    for changes in (scaled, *({name: text} for name, text in scaled.items())):
        with contextlib.suppress(ConfigError):
            config = with_changes(config, **changes)
            if changes is scaled:
                break
    return config


def _small_values(
    config: Config,
    among: Iterable[Config],
    width: int,
    max_context: int = CONTEXT,
    max_heads: int = HEADS,
) -> dict[str, SymbolValue]:
    """Return the value of every symbol in the small form of this width."""
    shape = config.model.shape
    context, heads = min(shape.block_size, max_context), min(shape.n_head, max_heads)
    form = SmallForm(
        values=config.values,
        peers=[c.values for c in among if c.model.shape.block_size == shape.block_size],
        full_context=shape.block_size,
        context=context,
        full_width=shape.n_embd,
        width=width,
        heads=heads,
    )
    values: dict[str, SymbolValue] = dict(config.values) | _ENVIRONMENT
    for name, bound in fields_by_symbol().items():
        if bound.small:
            values[name] = bound.small(form, name)
    # The narrow type that a CPU supports.
    if values["PRECISION"] == "fp16":
        values["PRECISION"] = "bf16"
    values |= {"N_LAYER": min(shape.n_layer, LAYERS), "BLOCK_SIZE": context, "N_EMBD": width}
    return values | ({"N_HEAD": heads} if width != shape.n_embd else {})
