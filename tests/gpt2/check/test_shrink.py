"""The small form preserves the differences between configurations."""

from pathlib import Path

import pytest

from gpt2.check.cases import config_layers_to_check, plan_cases
from gpt2.check.shrink import long_config, small_config, with_changes
from gpt2.config import Config
from gpt2.study.resolve import resolve_config
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer, parse_command_line_settings
from lib.config.tree import KconfigTree
from lib.project import ROOT


@pytest.fixture(scope="module")
def sliding() -> Config:
    settings = {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": 600}
    layers = [
        *config_layers_to_check(Path(), "gpt2-124m"),
        ConfigLayer.of("sliding", "a test", settings),
    ]
    return resolve_config(KconfigTree(), layers)


def windows(config: Config, *others: int) -> list[int]:
    """Return the small windows of ``config``, of 600 tokens, and of variants with other windows."""
    every = [config, *(with_changes(config, SLIDING_WINDOW=window) for window in others)]
    return [small_config(one, every).model.attention.pattern.window for one in every]


def test_nearby_windows_stay_distinct(sliding):
    (alone,) = windows(sliding)
    small = windows(sliding, 610, 620)
    assert small == sorted(set(small)) and small[0] == alone
    assert (
        small_config(with_changes(sliding, SLIDING_WINDOW=610)).model.attention.pattern.window
        == alone
    )


def test_windows_near_the_context_length_stay_distinct(sliding):
    small = windows(sliding, 1021, 1022, 1023, 1024)
    assert small == sorted(set(small)) and small[-2:] == [39, 40]


@pytest.mark.parametrize(("full", "small"), [(0, 0), (16, 8), (3072, 384), (60_000, 768)])
def test_no_width_keeps_the_small_form_from_being_small(sliding, full, small):
    assert small_config(with_changes(sliding, MLP_HIDDEN=full)).values["MLP_HIDDEN"] == small


def test_windows_of_another_context_do_not_matter(sliding):
    other = with_changes(sliding, BLOCK_SIZE=700, SLIDING_WINDOW=590)
    assert small_config(sliding, [other]) == small_config(sliding)


@pytest.mark.parametrize("name", ["nsa-quickstart", "nsa-perf", "nsa-125m-production"])
def test_selection_takes_all_blocks_if_it_does_at_full_size(name):
    """Random selection stays random; 14 tokens have more blocks than are selected."""
    configs = [c.config for c in plan_cases(defconfig_layers(ROOT, name)).every]
    small = [small_config(config, configs) for config in configs]
    seen = [(full, shrink_) for full, shrink_ in zip(configs, small) if is_nsa(full)]
    assert seen
    for full, shrunk in seen:
        nsa, its = full.model.attention.pattern, shrunk.model.attention.pattern
        sizes = full.model.shape.block_size, shrunk.model.shape.block_size
        assert nsa.selects_all(sizes[0]) == its.selects_all(sizes[1]) == (sizes[0] == 512)
        assert its.selects_all(14) == its.selects_all(40)
        assert (nsa.branches, nsa.select_by) == (its.branches, its.select_by)
        assert its.window <= 27 and its.hidden <= 12
    assert len({config.hash8 for config in small}) == len(small)


def is_nsa(config: Config) -> bool:
    return config.model.attention.pattern.name == "nsa"


def test_one_long_block_need_not_reach_a_number_of_parameters():
    """The positions of 22,824 tokens have most of the parameters, which one block cannot replace."""
    settings = {"MODEL_SIZE_CUSTOM": True, "N_LAYER": 12, "N_HEAD": 1, "N_EMBD": 8, "BIAS": False}
    settings |= {"BLOCK_SIZE": 22_824, "POSITIONS_ROPE": True, "MLP_SIZING_PARAMS": True}
    settings |= {"MLP_CROSS_TOKEN": True, "MLP_ATTN_GATE": True, "MLP_SHARE": "0.891"}
    layers = [
        *config_layers_to_check(Path(), "gpt2-124m"),
        ConfigLayer.of("narrow", "a test", settings),
    ]
    shape = long_config(resolve_config(KconfigTree(), layers)).model.shape
    assert (shape.n_layer, shape.block_size) == (1, 1024)


@pytest.mark.parametrize(
    "settings",
    [
        "N_LAYER=1 N_EMBD=8 N_HEAD=1 BLOCK_SIZE=1024 POSITIONS_ROPE=y BIAS=n",
        "N_LAYER=6 N_EMBD=36 N_HEAD=2 BLOCK_SIZE=38 ATTENTION_PROJECTION_LATENT=y LATENT_DIM=2",
    ],
)
def test_a_narrow_model_has_a_small_form(settings):
    """A step of a rounded width is more than 1 % of a narrow model without its context or depth."""
    common = "MODEL_SIZE_CUSTOM=y TOKENIZER_BYTE=y VOCAB_MULTIPLE=1 MLP_SIZING_PARAMS=y"
    layer = parse_command_line_settings(f"{common} {settings}")
    config = resolve_config(KconfigTree(), [layer])
    small = small_config(config).model.shape
    assert (small.n_embd, small.n_head) == (96, config.model.shape.n_head)


def test_mechanisms_of_the_long_form_have_weights():
    cases = plan_cases(defconfig_layers(ROOT, "gpt2-ratio-ablation")).every
    for case in cases:
        config = long_config(case.config).model
        for mechanism in config.mlp.mechanisms:
            assert not mechanism.sized or mechanism.dim > 0, case.slug
