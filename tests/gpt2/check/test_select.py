"""Selection of checks by name, and of the steps on which costly checks run."""

import pytest

from gpt2.check import CHECKS, select, select_for
from gpt2.check.cases import plan_cases
from gpt2.check.command import _jobs
from gpt2.check.cover import covering_steps
from gpt2.check.worker import CHECK_FUNCTIONS
from gpt2.config import Config
from gpt2.study.resolve import resolve_config
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.project import ROOT


def resolved(**settings: bool) -> Config:
    """Return the configuration of ``settings`` on top of the defaults."""
    return resolve_config(KconfigTree(), [ConfigLayer.of("defconfig", "test", settings)])


@pytest.fixture(scope="module")
def dense() -> Config:
    return resolved()


def test_every_check_has_a_function():
    assert CHECKS.keys() - CHECK_FUNCTIONS.keys() == {"resolve"}
    assert CHECK_FUNCTIONS.keys() <= CHECKS.keys()


def test_the_check_of_devices_runs_by_name_only(dense):
    assert [check.name for check in select_for([dense], "device")] == ["device"]
    for fast in (False, True):
        assert "device" not in {check.name for check in select_for([dense], "", fast=fast)}


def test_only_steps_that_prune_have_the_check_of_pruning(dense):
    pruning = resolved(PRUNING_MAGNITUDE=True)
    assert {check.name for check in select_for([dense], "")} == CHECKS.keys() - {"pruned", "device"}
    assert [check.name for check in select_for([dense, pruning], "pruned")] == ["pruned"]
    with pytest.raises(ConfigError) as caught:
        select_for([dense], "pruned")
    assert caught.value.codes == ["usage.not-applicable"]


def test_names_are_selected_in_the_standard_order():
    assert [check.name for check in select("data causal,resolve")] == ["resolve", "causal", "data"]


@pytest.mark.parametrize(
    ("defconfig", "covered"),
    [
        ("gpt2-ratio-ablation", "baseline pruned-50 ra-golden-mech full ract-weights ract-entropy"),
        ("nsa-quickstart", "baseline sliding nsa-shared nsa-mean nsa-softmax nsa-random"),
        ("gpt2-124m", "run"),
    ],
)
def test_costly_checks_run_on_steps_with_every_option(defconfig, covered):
    every = plan_cases(defconfig_layers(ROOT, defconfig)).every
    assert set(covering_steps(every)) == set(covered.split())


def test_steps_that_differ_in_a_number_alone_need_one():
    layers = [
        *defconfig_layers(ROOT, "gpt2-124m"),
        ConfigLayer.of(
            "matrix",
            "a test",
            {"TEST_MATRIX_MODE": True, "TEST_MATRIX_AXES": "BLOCK_SIZE=256,512 DROPOUT=0,0.1,0.2"},
        ),
    ]
    assert len(plan_cases(layers).every) == 6
    assert len(covering_steps(plan_cases(layers).every)) == 2


def test_named_checks_run_on_every_step_and_costly_ones_on_the_cover():
    cases = plan_cases(defconfig_layers(ROOT, "nsa-quickstart"))
    cover, checks = covering_steps(cases.chosen), [CHECKS["declared"], CHECKS["causal"]]
    for jobs, costly in ((_jobs(cases, checks, []), 10), (_jobs(cases, checks, cover), 6)):
        names = [check.name for job in jobs for check in job.checks]
        assert (names.count("declared"), names.count("causal")) == (10, costly)
