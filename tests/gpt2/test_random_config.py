"""Random configurations are valid, small and reproducible; configurations survive being saved."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kconfiglib import BOOL, INT, Choice

from gpt2.check.fields import fields_by_symbol
from gpt2.config import Config
from gpt2.random_config import randconfig, random_settings
from lib.config import commands
from lib.config.dotconfig import ConfigWorkspace
from lib.config.layers import ConfigLayer, parse_text
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from lib.project import ROOT

TREE = KconfigTree()


@pytest.fixture(scope="module")
def drawn() -> list[Config]:
    """Return the configurations of seeds 1 to 50."""
    configs = []
    for seed in range(1, 51):
        chosen = random_settings(TREE, Config.from_values, seed)
        layer = ConfigLayer.of("defconfig", "test", chosen)
        configs.append(TREE.checked([layer], Config.from_values)[1])
    return configs


def test_no_two_are_the_same(drawn):
    assert len({config.hash8 for config in drawn}) == len(drawn)


def test_every_mechanism_optimizer_and_pruner_is_drawn(drawn):
    for name in ("OPTIMIZER", "PRUNING", "ATTENTION_PROJECTION", "ATTENTION_PATTERN", "MLP_SIZING"):
        members = {m.removeprefix(f"{name}_").lower() for m in member_names(name)}
        assert {str(config.values[name]) for config in drawn} == members
    for name in ("RECIPROCAL", "RA_CROSS_TOKEN", "MLP_ATTN_GATE", "MLP_CROSS_TOKEN", "BIAS"):
        assert {config.values[name] for config in drawn} == {True, False}


def member_names(choice: str) -> tuple[str, ...]:
    """Return the members of a choice."""
    (info,) = [info for info in TREE.symbols() if info.name == choice]
    return info.members


def test_a_cpu_trains_each_without_a_download(drawn):
    for config in drawn:
        values = config.values
        assert (values["DEVICE"], values["DATASET"], values["TOKENIZER"]) == (
            "cpu",
            "default",
            "byte",
        )
        assert values["RUN_MODE"] == "single_training" and not values["DRY_RUN"]
        assert values["N_LAYER"] <= 6 and values["N_EMBD"] <= 192 and values["BLOCK_SIZE"] <= 128
        assert values["EVAL_TOKENS"] > values["BLOCK_SIZE"]
        assert values["BUDGET"] != "iterations" or values["MAX_ITERS"] <= 100


def test_the_command_writes_the_same_file_for_the_same_seed(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)
    texts = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        place = ConfigWorkspace(ROOT, tmp_path / name, Config.from_values)
        randconfig(place, seed)
        assert f"SEED={seed}" in capsys.readouterr().err
        texts.append(place.config.read_text())
        commands.olddefconfig(place)
        assert "0 dropped, 0 new" in capsys.readouterr().err
        assert place.config.read_text() == texts[-1]
    assert texts[0] == texts[1] != texts[2]


def test_without_a_seed_the_log_has_the_one_that_repeats_it(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)
    place = ConfigWorkspace(ROOT, tmp_path, Config.from_values)
    randconfig(place, None)
    text = place.config.read_text()
    said = capsys.readouterr().err
    randconfig(place, int(said.partition("SEED=")[2].split()[0]))
    assert place.config.read_text() == text


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


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
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
    saved = parse_text(TREE.minimal(resolution), "defconfig", "saved")
    again, config_again = TREE.checked([saved], Config.from_values)
    assert again.values == resolution.values and TREE.minimal(again) == TREE.minimal(resolution)
    assert config_again.digest == config.digest and config_again.identity() == config.identity()
    assert TREE.checked([parse_text(TREE.config_text(again), "config", "full")], dict)[1] == dict(
        resolution.values
    )
