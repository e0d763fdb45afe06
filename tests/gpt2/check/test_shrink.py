"""The small form keeps what tells configurations apart."""

from pathlib import Path

import pytest

from gpt2.ablation.resolve import resolve_config
from gpt2.check.cases import checked_layers
from gpt2.check.shrink import changed, shrink
from gpt2.config import Config
from lib.kconfig import Layer, Tree


@pytest.fixture(scope="module")
def sliding() -> Config:
    settings = {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": 600}
    layers = [*checked_layers(Path(), "gpt2-124m"), Layer.of("sliding", "a test", settings)]
    return resolve_config(Tree(), layers)


def windows(config: Config, *others: int) -> list[int]:
    """The small windows of ``config``, of 600 tokens, and of others beside it."""
    every = [config, *(changed(config, SLIDING_WINDOW=window) for window in others)]
    return [shrink(one, every).model.attention.pattern.window for one in every]


def test_windows_that_are_near_each_other_stay_apart(sliding):
    (alone,) = windows(sliding)
    found = windows(sliding, 610, 620)
    assert found == sorted(set(found)) and found[0] == alone
    assert shrink(changed(sliding, SLIDING_WINDOW=610)).model.attention.pattern.window == alone


def test_windows_at_the_end_of_the_context_stay_apart(sliding):
    found = windows(sliding, 1021, 1022, 1023, 1024)
    assert found == sorted(set(found)) and found[-2:] == [39, 40]


@pytest.mark.parametrize(("full", "small"), [(0, 0), (16, 8), (3072, 384), (60_000, 768)])
def test_no_width_keeps_the_small_form_from_being_small(sliding, full, small):
    assert shrink(changed(sliding, MLP_HIDDEN=full)).values["MLP_HIDDEN"] == small


def test_windows_of_another_context_do_not_matter(sliding):
    other = changed(sliding, BLOCK_SIZE=700, SLIDING_WINDOW=590)
    assert shrink(sliding, [other]) == shrink(sliding)
