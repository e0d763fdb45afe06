"""Symbols without an effect are reported, and symbols with an undeclared one."""

import dataclasses

import pytest

from gpt2.ablation.resolve import resolve_config
from gpt2.attention.reciprocal.options import ReciprocalOptions
from gpt2.check.context import CheckContext
from gpt2.check.fields import fields_by_symbol
from gpt2.check.symbol_effect import EffectCache, check_symbol, settings_to_enable
from gpt2.check.symbols import NOT_TESTABLE_ON_CPU, check_symbols, checkable_symbols
from gpt2.mlp.activations import ACTIVATIONS, GeluExactOptions, GeluTanhOptions
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.optim.options import SgdOptions

pytestmark = pytest.mark.usefixtures("torch_as_before")


@pytest.fixture(scope="module")
def tree():
    return KconfigTree()


@pytest.fixture
def effects():
    with CheckContext() as context:
        yield EffectCache(context)


def ignore(monkeypatch, cls, field, value):
    """Set ``field`` of every object of ``cls`` to ``value``, ignoring the arguments."""
    right = cls.__init__

    def init(self, *args, **kwargs):
        right(self, *args, **kwargs)
        object.__setattr__(self, field, value)

    monkeypatch.setattr(cls, "__init__", init)


@pytest.mark.parametrize(
    "name",
    ["RECIPROCAL_WINDOW", "MLP_CROSS_TOKEN_TAU", "PRUNING_SCOPE", "DROPOUT", "CHECKPOINT_KEEP"],
)
def test_a_symbol_that_acts_as_declared_passes(tree, effects, name):
    assert check_symbol(tree, name, effects) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cls", "field", "value"),
    [
        ("RECIPROCAL_WINDOW", ReciprocalOptions, "window", 5),
        ("SGD_DAMPENING", SgdOptions, "dampening", 0.0),
    ],
)
def test_a_dead_symbol_is_reported(tree, effects, monkeypatch, name, cls, field, value):
    ignore(monkeypatch, cls, field, value)
    assert check_symbol(tree, name, effects).code == "symbol.no-effect"


def test_a_dead_member_of_a_choice_is_named(tree, effects, monkeypatch):
    monkeypatch.setattr(GeluExactOptions, "build", GeluTanhOptions.build)
    problem = check_symbol(tree, "ACTIVATION", effects)
    assert problem.code == "symbol.no-effect"
    assert [n for n in ACTIVATIONS if n in problem.what] == ["gelu_tanh", "gelu_exact"]


def test_a_symbol_with_an_undeclared_effect_is_reported(tree, effects, monkeypatch):
    """GRAD_CLIP is declared not to be part of a run's identity."""
    harmless = dataclasses.replace(fields_by_symbol()["GRAD_CLIP"], identity=False)
    monkeypatch.setitem(fields_by_symbol(), "GRAD_CLIP", harmless)
    assert check_symbol(tree, "GRAD_CLIP", effects).code == "symbol.unexpected-effect"


def test_every_symbol_has_a_base_or_a_reason_not_to_be_tested(tree):
    tried = checkable_symbols(tree)
    for info in tried:
        item = tree.find(info.name)
        settings_to_enable(tree, item)
        assert item.visibility, info.name
    assert {s.name for s in tree.symbols()} >= NOT_TESTABLE_ON_CPU.keys()
    assert {info.name for info in tried} >= {"OPTIMIZER", "RECIPROCAL", "N_LAYER", "LOG_INTERVAL"}


def test_backend_symbols_are_neither_tested_nor_compared_among_steps(tree):
    forms = {name for name, reader in fields_by_symbol().items() if reader.form}
    assert forms >= {"ATTENTION_BACKEND", "NSA_RANGES", "GRAD_CHECKPOINTING", "COMPILE"}
    assert not forms & (
        NOT_TESTABLE_ON_CPU.keys() | {info.name for info in checkable_symbols(tree)}
    )
    given = {"DEVICE_CPU": True, "RUN_PROFILE_MAXOUT_SPEED": True, "MODEL_SIZE_TINY": True}
    plain, again, exact = (
        resolve_config(tree, [ConfigLayer.of("defconfig", "test", given | change)])
        for change in ({}, {"GRAD_CHECKPOINTING": True}, {"ACTIVATION_GELU_EXACT": True})
    )
    assert again.hash8 != plain.hash8 and again.function() == plain.function()
    assert exact.function() != plain.function()


def test_the_command_names_file_and_line(monkeypatch, tree):
    class Pool:
        def __init__(self, *args):
            pass

        def call_many(self, function, shares):
            return ((name, "[symbol.no-effect]") for (names,) in shares for name in names)

    monkeypatch.setattr("gpt2.check.symbols.check_executor", Pool)
    (info,) = [info for info in checkable_symbols(tree) if info.name == "SLIDING_WINDOW"]
    code, text = check_symbols("SLIDING_WINDOW")
    what = "SLIDING_WINDOW: [symbol.no-effect]  [make check-symbols SYM=SLIDING_WINDOW]"
    assert (code, text) == (1, f"FAIL  {info.where}: {what}\n0 passed, 1 failed\n")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("NONSENSE", "config.unknown-symbol"),
        ("DEVICE", "usage.unsupported-symbol"),
        ("JOBS", "config.unknown-symbol"),
        ("NSA_RANGES", "usage.unsupported-symbol"),
    ],
)
def test_a_symbol_that_cannot_be_tested_is_an_error(name, code):
    with pytest.raises(ConfigError) as caught:
        check_symbols(name)
    assert caught.value.codes == [code]
    assert name in str(caught.value)
