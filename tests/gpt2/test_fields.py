"""A field is named after its symbol, and has the symbol's value in every configuration."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from gpt2.check.fields import fields_by_symbol
from gpt2.check.shrink import with_scaled_floats
from gpt2.config import Config
from gpt2.random_config import random_settings
from gpt2.records.files import REGISTRIES
from lib.config.field import kconfig_fields
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.tracking.options import TRACKERS

# Words of fields that state a unit, and fields that have other words than their symbol.
UNITS = {"seconds", "hours", "gib", "percent", "iterations"}
OTHER_NAMES = {
    "LR_SCHEDULE": "kind",
    "ON_DONE_CMD": "on_done_command",
    "ON_FAIL_CMD": "on_fail_command",
    "ON_STUDY_DONE_CMD": "on_study_done_command",
    "PRUNING_SPARSITY": "target",
    "SPAM_WARMUP_STEPS": "reset_warmup_steps",
}


def bound_values(value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the symbol and the value of every bound field below ``value``."""
    if isinstance(value, tuple):
        for item in value:
            yield from bound_values(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        symbols = {field.name: field.metadata["symbol"] for field in kconfig_fields(type(value))}
        for name, inner in vars(value).items():
            if name in symbols:
                yield name, symbols[name], inner
            else:
                yield from bound_values(inner)


def as_text(value: Any) -> str:
    return ",".join(map(as_text, value)) if isinstance(value, tuple) else repr(value)


def as_read(value: Any, text: Any) -> str:
    """Return the value of a symbol as ``as_text`` returns that of a field of the same type."""
    if isinstance(value, tuple):
        words = str(text).replace(",", " ").split()
        return as_text(tuple(type(value[0])(word) for word in words)) if value else ",".join(words)
    return repr(float(text)) if isinstance(value, float) else repr(text)


@pytest.fixture(scope="module")
def configs() -> list[Config]:
    """Return random configurations, also with small floats: no number is that of a constant."""
    tree = KconfigTree()
    layers = (
        ConfigLayer.of("config", "test", random_settings(tree, Config.from_values, seed))
        for seed in range(1, 13)
    )
    drawn = [tree.checked([layer], Config.from_values)[1] for layer in layers]
    symbols = fields_by_symbol().keys()
    return drawn + [with_scaled_floats(c, symbols & c.values.keys(), 0.37) for c in drawn[:4]]


@pytest.mark.slow
def test_every_field_is_named_after_its_symbol(configs):
    pairs = {(name, symbol) for config in configs for name, symbol, _ in bound_values(config)}
    assert len(pairs) > 150
    for name, symbol in pairs:
        words = symbol.lower().split("_")
        parts = [part for part in name.split("_") if part not in UNITS]
        alike = all(any(w.startswith(p) or p.startswith(w) for w in words) for p in parts)
        assert OTHER_NAMES.get(symbol, name) == name, symbol
        assert symbol in OTHER_NAMES or (alike and name not in OTHER_NAMES.values()), symbol


@pytest.mark.slow
def test_every_field_has_the_value_of_its_symbol(configs):
    for config in configs:
        stand_in = {"DATASET": "default"} if config.data.stand_in else {}
        values = config.values | stand_in
        for name, symbol, value in bound_values(config):
            if values[symbol] is not None:
                assert as_text(value) == as_read(value, values[symbol]), (name, symbol)


@pytest.mark.parametrize("registry", [*REGISTRIES, TRACKERS], ids=lambda registry: registry.kind)
def test_every_registered_component_can_be_selected_and_no_other(registry):
    tree = KconfigTree()
    expected = {f"{registry.choice}_{name}".strip("_").upper() for name in registry}
    choice = tree.find(registry.choice)
    options = {s.name for s in choice.syms} if choice else set(filter(tree.find, expected))
    assert options == expected


def test_a_share_of_a_whole_is_at_most_one():
    names = "PRUNING_WARMUP PRUNING_RAMP_END WSD_DECAY_FRACTION RA_CROSS_TOKEN_ALPHA SGD_MOMENTUM "
    names += "MLP_ATTN_GATE_ALPHA SPAM_MOMENT_DAMPING SPAM_VARIANCE_DAMPING ADAM_BETA1 ADAM_BETA2"
    fields = fields_by_symbol()
    bounds = {name: (fields[name].low, fields[name].high) for name in names.split()}
    assert bounds == dict.fromkeys(names.split(), (0.0, 1.0))
