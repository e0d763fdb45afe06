"""MLP_SIZING_PARAMS: equally many parameters in all steps, or a refusal that names the others."""

import pytest

from gpt2.check.cases import plan_cases
from gpt2.study.plan import make_plan
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.project import ROOT
from tests.errors import error_of

OTHERS = 13


def layers(defconfig="gpt2-ratio-ablation", **settings):
    given = ConfigLayer.of("command line", "SET", {"MLP_SIZING_PARAMS": True, **settings})
    return [*defconfig_layers(ROOT, defconfig), given]


@pytest.mark.parametrize("steps", ["", "golden"])
@pytest.mark.parametrize("command", [make_plan, plan_cases])
def test_steps_with_a_sizing_of_their_own_are_refused_by_name(command, steps, tmp_path):
    error = error_of(command, layers(), build_dir=tmp_path, steps=steps)
    (problem,) = error.problems
    assert (error.exit_code, problem.code) == (2, "study.unequal-parameters")
    assert problem.what.startswith(f"MLP_SIZING_PARAMS: {OTHERS} of 19 steps ")
    names = problem.what.partition("(got ")[2].rstrip(")").split(", ")
    assert len(names) == OTHERS and {"golden", "mla", "full"} <= {*names}
    followers = "baseline,pruned-50,ra,ract,ract-weights,ract-entropy"
    assert f"make STEPS={followers}," in problem.next


def test_the_other_steps_have_equally_many_parameters(tmp_path):
    plan = make_plan(layers(), tmp_path, steps="baseline,pruned-50,ra,ract,ract-weights")
    sizes = [run.config.model.num_params() for run in plan.runs]
    assert len(sizes) == 5 and max(sizes) / min(sizes) < 1.01
    assert str(OTHERS - 1) in plan.left_out[0].what + "".join(map(str, plan.left_out))


def test_a_step_may_set_it_itself(tmp_path):
    (tmp_path / "study.toml").write_text(
        'name = "sizes"\n[[step]]\nname = "baseline"\n[[step]]\nname = "rope"\n'
        "set = { POSITIONS_ROPE = true, MLP_SIZING_PARAMS = true }\n"
    )
    given = ConfigLayer.of("command line", "SET", {"ABLATION_STUDY_OWN": True})
    base = defconfig_layers(ROOT, "gpt2-ratio-ablation")
    assert len(make_plan([*base, given], tmp_path).runs) == 2
