"""Compiled runs have the same run without the compiler beside them, apart in every table."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2.planning import view
from gpt2.planning.plan import Plan, Sweep, config_layers, make_plan, make_trial
from lib.config.field import SymbolValue
from lib.config.layers import parse_command_line_settings
from lib.errors import ConfigError
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.build_folder import write_build

SMALL: dict[str, SymbolValue] = {
    "RUN_PROFILE_MAXOUT_SPEED": True,
    "DEVICE_CPU": True,
    "MODEL_SIZE_TINY": True,
    "TOKENIZER_BYTE": True,
    "COMPILE": True,
}
STUDY = {"RA_MLA_ABLATION_MODE": True, "RA_MLA_ABLATION_STEPS": "0,golden,3"}
MATRIX = {"TEST_MATRIX_MODE": True, "TEST_MATRIX_AXES": "N_LAYER=1,2", "MODEL_SIZE_CUSTOM": True}
PAPER = {"RUN_PROFILE_MAXOUT_SPEED": None}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write a .config; its build folder. None takes one of the small settings away."""

    def write(**settings: SymbolValue | None) -> Path:
        given = {name: v for name, v in {**SMALL, **settings}.items() if v is not None}
        return write_build(tmp_path, given)

    return write


@pytest.fixture
def planned(written: Callable[..., Path]) -> Callable[..., Plan]:
    """The plan of such a .config."""

    def plan(seeds: str = "", sweep: Sweep | None = None, **settings: SymbolValue | None) -> Plan:
        build = written(**settings)
        return make_plan(config_layers(build), build, seeds=seeds, sweep=sweep)

    return plan


def slugs(plan: Plan) -> list[str]:
    return [run.variant.slug for run in plan.runs]


def test_a_training_has_its_twin(planned: Callable[..., Plan]) -> None:
    compiled, eager = planned().runs
    assert (compiled.label, eager.label) == ("single/run s1", "single/run-eager s1")
    assert (compiled.variant.arm, eager.variant.arm) == ("compiled", "eager")
    # What it is called apart, it is the run that would be planned without the compiler.
    (plain,) = planned(COMPILE=None).runs
    assert eager.config.identity() == plain.config.identity()
    assert compiled.config.machine.compile and not plain.config.machine.compile


def test_what_was_done_without_the_compiler_is_the_twin(planned: Callable[..., Plan]) -> None:
    (plain,) = planned(COMPILE=None).runs
    plain.path.mkdir(parents=True)
    write_status(RunDir(plain.path), RunStatus(State.SUCCESS))
    compiled, eager = planned().runs
    assert eager.path == plain.path != compiled.path
    assert (eager.label, eager.variant.arm) == ("single/run-eager s1", "eager")


def test_a_study_has_a_twin_of_every_step_and_seed(planned: Callable[..., Plan]) -> None:
    plan = planned(seeds="1,2", **STUDY)
    steps = slugs(plan)[:3]
    assert slugs(plan) == 2 * [*steps, *(f"{step}-eager" for step in steps)]
    twins = [run.variant for run in plan.runs[3:6]]
    assert [twin.parent for twin in twins] == ["", "baseline-eager", "golden-eager"]
    # A number names one run of each seed.
    assert [run.variant.slug for run in plan.matching("3")] == 2 * [steps[2]]


def test_a_matrix_has_twins_where_it_does_not_compare_compilers(
    planned: Callable[..., Plan],
) -> None:
    cells = ["n-layer-1", "n-layer-2"]
    plan = planned(**MATRIX, MODEL_SIZE_TINY=None)
    assert slugs(plan) == [*cells, *(f"{cell}-eager" for cell in cells)]
    assert [run.variant.levels is None for run in plan.runs] == [False, False, True, True]
    both = planned(
        **{**MATRIX, "TEST_MATRIX_AXES": "COMPILE=n,y N_LAYER=1,2"}, MODEL_SIZE_TINY=None
    )
    assert len(both.runs) == 4 and {run.variant.arm for run in both.runs} == {""}


def test_they_can_be_left_out(planned: Callable[..., Plan]) -> None:
    (alone,) = planned(COMPILE_EAGER_TWIN=False).runs
    assert alone.variant.arm == "" and alone.path == planned().runs[0].path


def test_a_paper_takes_the_compiler_with_the_twin_alone(planned: Callable[..., Plan]) -> None:
    assert slugs(planned(**PAPER)) == ["run", "run-eager"]
    assert slugs(planned(**PAPER, COMPILE_BLOCKS=True)) == ["run", "run-eager"]
    with pytest.raises(ConfigError) as refusal:
        planned(**PAPER, COMPILE_EAGER_TWIN=False)
    assert refusal.value.codes == ["config.unpaired-compile"]
    assert "SET=COMPILE_EAGER_TWIN=y" in str(refusal.value)


def test_what_only_looks_around_has_none(
    planned: Callable[..., Plan], written: Callable[..., Path]
) -> None:
    sweep = Sweep("LEARNING_RATE=1e-3,2e-3")
    assert len(planned(sweep=sweep).runs) == 2
    build = written()
    trial = make_trial(
        config_layers(build), build, parse_command_line_settings(["GRAD_CLIP=0.5"]), 10
    )
    assert slugs(trial) == ["base", "grad-clip-0.5"]
    # And a paper is not given one arm alone by them either.
    with pytest.raises(ConfigError) as refusal:
        planned(sweep=sweep, **PAPER)
    assert refusal.value.codes == ["config.unpaired-compile"]


def test_the_plan_shows_them_and_what_they_cost(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib.env.speed._measure", lambda threads: 1e10)
    plan = planned(**STUDY)
    views = view.look(plan)
    text = view.plan_text(plan, views)
    assert "ratio/golden-eager s1" in text
    assert "\n3 run(s) " in text and "SET=COMPILE_EAGER_TWIN=n" in text
    assert "6 x 1 seed, 6 runs" in text
    plain = planned(COMPILE=None)
    assert "-eager" not in view.plan_text(plain, view.look(plain))
