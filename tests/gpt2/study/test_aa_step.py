"""A study with several seeds has an A/A step: the baseline with other initial weights."""

from functools import partial

import pytest

from gpt2.study.plan import table_plan
from lib.runs.run import training_order
from lib.runs.run_dir import RunDir, RunStatus, State, write_status

STUDY = {
    "RUN_PROFILE_MAXOUT_SPEED": True,
    "MAX_ITERS": None,
    "RA_MLA_ABLATION_MODE": True,
    "RA_MLA_ABLATION_STEPS": "0,golden",
    # So that the baseline is not trained twice.
    "DETERMINISTIC_STRICT": True,
}


@pytest.fixture
def planned(planned):
    return partial(planned, seeds="1-3", **STUDY)


def slugs(plan):
    return list(dict.fromkeys(run.variant.slug for run in plan.runs))


def test_a_study_with_three_seeds_has_one(planned):
    plan = planned()
    assert slugs(plan) == ["baseline", "golden", "baseline-aa"] and len(plan.runs) == 9
    baseline, _, aa = plan.runs[:3]
    assert aa.variant.is_aa and not baseline.variant.is_aa
    assert (aa.variant.parent, aa.variant.number, aa.seed) == ("baseline", None, baseline.seed)
    other = baseline.config.values.items() ^ aa.config.values.items()
    assert {name for name, _ in other} == {"INIT_STREAM"}
    assert baseline.config.hash8 != aa.config.hash8
    assert baseline.config.init.init_stream + 1 == aa.config.init.init_stream


@pytest.mark.parametrize(
    "options",
    [
        *({"seeds": "1,2"}, {"steps": "0,golden"}, {"VERDICT_AA": False}),
        *({"INIT_FROM": "hf:./gpt2"}, {"RA_MLA_ABLATION_STEPS": "golden,3"}),
        {"RA_MLA_ABLATION_STEPS": "0"},
    ],
    ids=str,
)
def test_a_part_of_a_study_and_a_single_seed_have_none(planned, options):
    assert not any(run.variant.is_aa for run in planned(**options).runs)


def test_the_table_of_a_part_of_the_study_has_the_step_if_it_was_trained(planned):
    whole, part = planned(), planned(steps="golden")
    assert slugs(table_plan(part)) == ["golden"]
    whole.runs[2].path.mkdir(parents=True)
    assert slugs(table_plan(part)) == ["golden", "baseline-aa"]


@pytest.mark.parametrize(
    "options", [{"DETERMINISTIC_STRICT": False, "DETERMINISTIC_OFF": True}, {"BUDGET_TIME": True}]
)
def test_the_baseline_is_trained_twice_if_its_bits_may_differ(planned, options):
    plan = planned(**options)
    assert slugs(plan) == ["baseline", "golden", "baseline-aa", "baseline-again"]
    again = plan.runs[3]
    assert again.variant.is_repeat and again.config == plan.runs[0].config
    # The first run of each block, and the last.
    order = [run.variant.slug for run in training_order(plan.runs)]
    assert order[0::4] == ["baseline"] * 3 and order[3::4] == ["baseline-again"] * 3
    # Neither takes the directory of the other.
    again.path.mkdir(parents=True)
    write_status(RunDir(again.path), RunStatus(State.SUCCESS))
    assert [run.path for run in planned(**options).runs] == [run.path for run in plan.runs]
    assert not any(run.variant.is_repeat for run in planned(**options, steps="0,golden").runs)
