"""The small form preserves the differences between configurations."""

from pathlib import Path

import pytest

from gpt2.check.cases import config_layers_to_check, plan_cases
from gpt2.check.shrink import long_config, small_config, with_changes
from gpt2.study.resolve import resolve_config
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import parse_command_line_settings
from lib.config.tree import KconfigTree
from lib.project import ROOT


def configured(settings, base=None):
    layers = [parse_command_line_settings(settings)]
    if base:
        layers = [*config_layers_to_check(Path(), base), *layers]
    return resolve_config(KconfigTree(), layers)


@pytest.fixture(scope="module")
def sliding():
    return configured("ATTENTION_PATTERN_SLIDING=y SLIDING_WINDOW=600", "gpt2-124m")


def windows(config, *others):
    """Return the small windows of ``config``, of 600 tokens, and of variants with other windows."""
    every = [config, *(with_changes(config, SLIDING_WINDOW=window) for window in others)]
    return [small_config(one, every).model.attention.pattern.window for one in every]


def test_nearby_windows_stay_distinct(sliding):
    small = windows(sliding, 610, 620)
    assert small == sorted(set(small))
    for window in (600, 610):
        assert windows(with_changes(sliding, SLIDING_WINDOW=window)) == small[:1]
    # Near the length of the context, too.
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
    pairs = [(full.model, shrunk.model) for full, shrunk in zip(configs, small, strict=True)]
    pairs = [pair for pair in pairs if pair[0].attention.pattern.name == "nsa"]
    assert pairs
    for full, shrunk in pairs:
        nsa, its = full.attention.pattern, shrunk.attention.pattern
        lengths = full.shape.block_size, shrunk.shape.block_size
        assert nsa.selects_all(lengths[0]) == its.selects_all(lengths[1]) == (lengths[0] == 512)
        assert its.selects_all(14) == its.selects_all(40)
        assert (nsa.branches, nsa.select_by) == (its.branches, its.select_by)
        assert its.window <= 27 and its.hidden <= 12
    assert len({config.hash8 for config in small}) == len(small)


def test_one_long_block_need_not_reach_a_number_of_parameters():
    """The positions of 22,824 tokens have most of the parameters, which one block cannot replace."""
    settings = "MODEL_SIZE_CUSTOM=y N_LAYER=12 N_HEAD=1 N_EMBD=8 BIAS=n BLOCK_SIZE=22824 "
    settings += "POSITIONS_ROPE=y MLP_SIZING_PARAMS=y MLP_CROSS_TOKEN=y MLP_ATTN_GATE=y "
    shape = long_config(configured(f"{settings} MLP_SHARE=0.891", "gpt2-124m")).model.shape
    assert (shape.n_layer, shape.block_size) == (1, 1024)


@pytest.mark.parametrize(
    "settings",
    [
        "N_LAYER=1 N_EMBD=8 N_HEAD=1 BLOCK_SIZE=1024 POSITIONS_ROPE=y BIAS=n",
        "N_LAYER=3 N_EMBD=10 N_HEAD=5 BLOCK_SIZE=38 ATTENTION_PROJECTION_LATENT=y LATENT_DIM=2",
    ],
)
def test_a_narrow_model_has_a_small_form(settings):
    """A step of a rounded width is more than 1 % of a narrow model without its context or depth."""
    common = "MODEL_SIZE_CUSTOM=y TOKENIZER_BYTE=y VOCAB_MULTIPLE=1 MLP_SIZING_PARAMS=y"
    config = configured(f"{common} {settings}")
    small = small_config(config).model.shape
    assert (small.n_embd, small.n_head) == (96, min(4, config.model.shape.n_head))


def test_mechanisms_of_the_long_form_have_weights():
    cases = plan_cases(defconfig_layers(ROOT, "gpt2-ratio-ablation")).every
    for case in cases:
        config = long_config(case.config).model
        for mechanism in config.mlp.mechanisms:
            assert not mechanism.sized or mechanism.dim > 0, case.slug
