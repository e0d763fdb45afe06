"""Selection of checks by name, and by the mechanisms that declare them."""

import pytest

from gpt2.check import CHECKS, select, select_for
from gpt2.check.worker import CHECK_FUNCTIONS
from gpt2.config import Config
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError


def resolved(**settings: bool) -> Config:
    """Return the configuration of ``settings`` on top of the defaults."""
    return resolve_config(KconfigTree(), [ConfigLayer.of("defconfig", "test", settings)])


@pytest.fixture(scope="module")
def dense() -> Config:
    return resolved()


@pytest.fixture(scope="module")
def sparse() -> Config:
    return resolved(ATTENTION_PROJECTION_GROUPED=True, ATTENTION_PATTERN_NSA=True)


def test_every_check_has_a_function():
    assert CHECKS.keys() - CHECK_FUNCTIONS.keys() == {"resolve"}
    assert CHECK_FUNCTIONS.keys() <= CHECKS.keys()


def test_only_steps_with_a_mechanism_have_its_checks(dense, sparse):
    own, pruning = {"field", "entropy"}, {"pruned"}
    usual = CHECKS.keys() - {"device"}
    assert {check.name for check in select_for([dense], "")} == usual - own - pruning
    assert {check.name for check in select_for([dense, sparse], "")} == usual - pruning
    assert {name for name in CHECKS if CHECKS[name].applies_to(sparse)} == CHECKS.keys() - pruning
    assert own.isdisjoint(check.name for check in select_for([sparse], "", fast=True))


def test_the_check_of_devices_runs_by_name_only(dense):
    assert [check.name for check in select_for([dense], "device")] == ["device"]
    for fast in (False, True):
        assert "device" not in {check.name for check in select_for([dense], "", fast=fast)}


def test_a_named_check_that_applies_to_no_step_is_an_error(dense, sparse):
    with pytest.raises(ConfigError) as caught:
        select_for([dense], "field,causal")
    assert caught.value.codes == ["usage.not-applicable"]
    assert [check.name for check in select_for([dense, sparse], "field,causal")] == [
        "causal",
        "field",
    ]


def test_only_steps_that_prune_have_the_check_of_pruning(dense):
    pruning = resolved(PRUNING_MAGNITUDE=True)
    assert [check.name for check in select_for([dense, pruning], "pruned")] == ["pruned"]
    with pytest.raises(ConfigError) as caught:
        select_for([dense], "pruned")
    assert caught.value.codes == ["usage.not-applicable"]


def test_names_are_selected_in_the_standard_order():
    assert [check.name for check in select("data causal,resolve")] == ["resolve", "causal", "data"]
