"""Selection of checks by name, and of the steps on which costly checks run."""

import pytest

from gpt2.check import CHECKS, select
from gpt2.check.cases import plan_cases
from gpt2.check.command import plan_jobs
from gpt2.check.cover import covering_steps
from gpt2.check.worker import CHECK_FUNCTIONS
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.project import ROOT

COSTLY = ["causal", "reference", "decode"]


def test_every_check_has_a_function():
    assert set(CHECKS) - set(CHECK_FUNCTIONS) == {"resolve", "distinct"}
    assert set(CHECK_FUNCTIONS) <= set(CHECKS)


@pytest.mark.parametrize(
    ("names", "options", "selected"),
    [
        ("data causal,resolve", {}, ["resolve", "causal", "data"]),
        ("device", {}, ["device"]),
        ("", {}, [name for name in CHECKS if name != "device"]),
        ("", {"prunes": False}, [name for name in CHECKS if name not in ("device", "pruned")]),
        ("", {"fast": True}, ["resolve", "distinct", "declared", *COSTLY, "data"]),
        ("pruned", {"fast": True}, ["pruned"]),
    ],
)
def test_checks_are_selected_in_the_standard_order(names, options, selected):
    assert [check.name for check in select(names, **options)] == selected


def test_a_named_check_that_applies_to_no_step_is_an_error():
    with pytest.raises(ConfigError) as caught:
        select("pruned", prunes=False)
    assert caught.value.codes == ["usage.not-applicable"]


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
    for jobs, costly in ((plan_jobs(cases, checks, []), 10), (plan_jobs(cases, checks, cover), 6)):
        names = [name for _, its in jobs for name in its]
        assert (names.count("declared"), names.count("causal")) == (10, costly)
