"""The steps of a study differ exactly in the symbols that the study declares."""

from pathlib import Path

import pytest

from gpt2.records.compare import chosen_runs, declared_axes, symbol_names, whole_study
from gpt2.study.plan import Plan, make_plan
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.project import ROOT
from lib.report.run_facts import differing_settings
from lib.runs.identity import flatten_identity
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

STUDIES = ["gpt2-ratio-ablation", "gpt2-mechanisms", "test-matrix-optimizers"]


@pytest.mark.parametrize("name", STUDIES)
def test_the_steps_of_a_study_differ_in_what_they_declare(name: str, tmp_path: Path) -> None:
    layers = defconfig_layers(ROOT, name)
    study = whole_study(make_plan(layers, tmp_path))
    axes = declared_axes(study, [RunRecord(RunDir(run.path)) for run in study.runs], "")
    assert len(study.runs) > 2
    first = study.runs[0]
    for run in study.runs[1:]:
        names = symbol_names(first.config) | symbol_names(run.config)
        settings = (flatten_identity(each.config.identity()) for each in (first, run))
        found = {names[path] for path in differing_settings(*settings)}
        assert found and found <= axes[first.path] | axes[run.path], run.label


def test_a_step_declares_what_the_steps_below_it_change(tmp_path: Path) -> None:
    layers = defconfig_layers(ROOT, "gpt2-ratio-ablation")
    plan = make_plan(layers, tmp_path, steps="0,7")
    (last,) = declared_axes(whole_study(plan), [RunRecord(RunDir(plan.runs[1].path))], "").values()
    assert {"RECIPROCAL", "MLP_SIZING", "MLP_ATTN_GATE", "MLP_CROSS_TOKEN"} <= last
    # A choice, not the member that the step sets.
    assert "MLP_SIZING_RATIO" not in last
    assert not last & {"BATCH_SIZE", "COMPILE", "LEARNING_RATE"}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    layers = [*defconfig_layers(ROOT, "gpt2-ratio-small"), ConfigLayer.of("test", "test", {})]
    return make_plan(layers, tmp_path, steps="0,5")


@pytest.mark.parametrize(
    ("named", "code", "value"),
    [
        ("", "run.not-finished", "ratio"),
        ("nonesuch", "run.not-found", "nonesuch"),
        ("ra", "run.not-found", "ra-s1-"),
    ],
)
def test_a_name_without_a_finished_run_is_an_error(
    plan: Plan, named: str, code: str, value: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen_runs(plan, plan, named)
    assert caught.value.codes == [code] and value in str(caught.value)
