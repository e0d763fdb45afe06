"""Random configurations are valid, small and reproducible; configurations survive being saved."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kconfiglib import BOOL, INT, Choice

from gpt2.check.fields import fields_by_symbol
from gpt2.config import Config
from gpt2.random_config import random_settings
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer, parse_text
from lib.config.tree import KconfigTree, member_values
from lib.errors import ConfigError, Problem
from lib.kablate import call

TREE = KconfigTree()


NAMES = ("OPTIMIZER", "PRUNING", "ATTENTION_PROJECTION", "ATTENTION_PATTERN", "MLP_SIZING")
VALUES = {name: set(member_values(TREE.kconf.named_choices[name])) for name in NAMES}
BOOLS = ("RECIPROCAL", "RA_CROSS_TOKEN", "MLP_ATTN_GATE", "MLP_CROSS_TOKEN", "BIAS")
VALUES |= {name: {True, False} for name in BOOLS}
# The first ones have all values now, the others follow until all are drawn.
SEEDS = (1, 4, 21, 25, 33, 42, *range(100, 140))


def values_drawn(configs: list[Config]) -> dict[str, set[SymbolValue]]:
    return {name: {config.values[name] for config in configs} for name in VALUES}


@pytest.fixture(scope="module")
def drawn() -> list[Config]:
    """Return random configurations, at least ten."""
    configs: list[Config] = []
    for seed in SEEDS:
        layer = ConfigLayer.of("defconfig", "test", random_settings(TREE, Config.from_values, seed))
        configs.append(TREE.checked([layer], Config.from_values)[1])
        if len(configs) >= 10 and values_drawn(configs) == VALUES:
            break
    return configs


@pytest.mark.slow
def test_every_mechanism_optimizer_and_pruner_is_drawn(drawn):
    assert len({config.hash8 for config in drawn}) == len(drawn)
    assert values_drawn(drawn) == VALUES


@pytest.mark.slow
def test_a_cpu_trains_each_without_a_download(drawn):
    fixed = {"DEVICE": "cpu", "DATASET": "default", "TOKENIZER": "byte", "DRY_RUN": False}
    fixed |= {"RUN_MODE": "single_training"}
    for values in (config.values for config in drawn):
        assert fixed.items() <= values.items()
        assert values["N_LAYER"] <= 6 and values["N_EMBD"] <= 192 and values["BLOCK_SIZE"] <= 128
        assert values["EVAL_TOKENS"] > values["BLOCK_SIZE"]
        assert values["BUDGET"] != "iterations" or values["MAX_ITERS"] <= 100


@pytest.mark.slow
def test_the_command_writes_the_same_file_for_the_same_seed(tmp_path, monkeypatch, capsys):
    """Without a seed, the log has the one that repeats it."""
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)

    def written(name: str, *words: str) -> str:
        assert call("randconfig", ["-O", str(tmp_path / name), *words]) == 0
        return (tmp_path / name / ".config").read_text()

    text = written("a")
    seed = int(capsys.readouterr().err.partition("SEED=")[2].split()[0])
    assert written("b", "--seed", str(seed)) == text != written("c", "--seed", str(seed + 1))
    capsys.readouterr()
    assert call("olddefconfig", ["-O", str(tmp_path / "a")]) == 0
    assert "0 dropped, 0 new" in capsys.readouterr().err
    assert (tmp_path / "a" / ".config").read_text() == text


def test_rules_that_nothing_satisfies_are_an_error():
    def refuse(values: object) -> None:
        raise ConfigError(Problem("DROPOUT: never right", code="config.conflict"))

    with pytest.raises(ConfigError, match="DROPOUT: never right") as caught:
        random_settings(TREE, refuse, 1)
    assert caught.value.codes == ["config.unsatisfied"]


def values_of(item) -> st.SearchStrategy[str]:
    """Return the legal values of a symbol or choice, as text."""
    if isinstance(item, Choice):
        return st.sampled_from([member.name for member in item.syms])
    if item.orig_type is BOOL:
        return st.sampled_from("yn")
    if item.orig_type is INT:
        low, high = (int(bound.str_value) for bound in item.ranges[0][:2])
        return st.integers(low, max(low, high)).map(str)
    reader = fields_by_symbol()[item.name]
    if reader.kind is not float:
        return st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=9)
    return st.floats(reader.low, reader.high, allow_nan=False, allow_infinity=False).map(repr)


TREE.resolve([])
ITEMS = [i for i in TREE.items() if any(node.prompt for node in i.nodes)]


QUICK = settings(max_examples=25)


@settings(QUICK, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_configuration_is_the_same_after_it_is_saved(data):
    """Draw any values within the ranges: rules may refuse them, with a code."""
    items = data.draw(st.lists(st.sampled_from(ITEMS), max_size=12, unique_by=lambda i: i.name))
    chosen = {}
    for item in items:
        value = data.draw(values_of(item), label=item.name)
        chosen |= {value: "y"} if isinstance(item, Choice) else {item.name: value}
    layer, _ = TREE.adapt(ConfigLayer.of("config", "test", chosen))
    try:
        resolution, config = TREE.checked([layer], Config.from_values)
    except ConfigError as error:
        assert all(problem.code for problem in error.problems)
        return
    text = TREE.minimal(resolution.layers)
    again, config_again = TREE.checked([parse_text(text, "defconfig", "saved")], Config.from_values)
    assert again.values == resolution.values and TREE.minimal(again.layers) == text
    assert config_again.digest == config.digest and config_again.identity() == config.identity()
    full = parse_text(TREE.config_text(again.layers), "config", "full")
    assert TREE.checked([full], dict)[1] == dict(resolution.values)
