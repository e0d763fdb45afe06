"""Titles of steps: their numbers are those of the step's configuration."""

import re

import pytest

from gpt2.check.cases import plan_cases
from gpt2.study.plan import make_plan
from gpt2.study.study_file import STUDIES
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.project import ROOT
from tests.errors import error_of


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_built_in_title_writes_no_number(study):
    numbers = re.compile(r"\d|\b(two|three|four|twice)\b")
    assert [
        s.slug for s in study.steps if numbers.search(re.sub(r"GPT-2|{.*?}", "", s.title))
    ] == []


OWN = """\
name = "own"

[[step]]
name = "baseline"
title = "{N_LAYER} layers"

[[step]]
name = "half"
title = "half the rate"
set = { LEARNING_RATE = "5e-4" }

[[step]]
name = "ratio"
title = "TITLE"
set = { MLP_SIZING_RATIO = true, MLP_RATIO = 3.0 }
params = [-1, 9]
"""


@pytest.fixture
def own_study(tmp_path):
    """Return a function that writes a study with this title, and returns the layers of .config."""

    def write(title, **settings):
        (tmp_path / "study.toml").write_text(OWN.replace("TITLE", title))
        own = {"ABLATION_STUDY_OWN": True, **settings}
        return [
            *defconfig_layers(ROOT, "gpt2-ratio-ablation"),
            ConfigLayer.of("command line", "SET", own),
        ]

    return write


def test_plan_and_check_show_the_values_of_the_configuration(own_study, tmp_path):
    title = "{{r}} {MLP_RATIO}, rate {LEARNING_RATE}, {OPTIMIZER}, {DROPOUT:%} in {N_LAYER:word}"
    layers = own_study(title, MODEL_SIZE_CUSTOM=True, N_LAYER=3, DROPOUT="0.1")
    runs = make_plan(layers, tmp_path).runs
    expected = f"{{r}} 3.0, rate {runs[0].config.schedule.learning_rate:g}"
    assert [run.variant.title for run in runs][:2] == ["3 layers", "half the rate"]
    (shown,) = {run.variant.title for run in runs if run.variant.slug == "ratio"}
    assert shown.replace("6e-4", "0.0006") == f"{expected}, adamwspam, 10 % in three"
    cases = plan_cases(layers, build_dir=tmp_path).every
    assert [case.title for case in cases] == ["3 layers", "half the rate", shown]


@pytest.mark.parametrize(
    ("title", "what"),
    [
        ("{MLP_RATO}", "{MLP_RATO} .*nearest: MLP_RATIO"),
        # In the tree, but without an effect in the configuration of the step.
        ("{SLIDING_WINDOW}", "{SLIDING_WINDOW} .*applies"),
        ("{}", "unknown field {}"),
        ("{BIAS:%}", "{BIAS:%}: not a number: True"),
        ("{BLOCK_SIZE:word} tokens", "{BLOCK_SIZE:word}: not a number"),
    ],
)
def test_a_wrong_field_is_an_error_with_its_line(own_study, tmp_path, title, what):
    layers = own_study(title)
    error = error_of(make_plan, layers, tmp_path)
    (problem,) = error.problems
    assert problem.code == "study.invalid-title" and error.exit_code == 2
    assert problem.where.startswith(f"{tmp_path / 'study.toml'}:14: ")
    assert re.search(what, problem.what) and "{SYMBOL}" in problem.next


def test_a_step_that_is_not_selected_may_have_a_wrong_title(own_study, tmp_path):
    plan = make_plan(own_study("{NO_SUCH}"), tmp_path, steps="0,1")
    assert len(plan.runs) == 2 and "NO_SUCH" in plan.left_out[0].what
