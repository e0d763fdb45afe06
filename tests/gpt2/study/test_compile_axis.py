"""Compiled runs stand alone, or as the axis of a matrix or a sweep."""

from collections.abc import Callable
from functools import partial

import pytest

from gpt2.records.compare import declared_axes
from gpt2.study.plan import Plan
from lib.config.field import SymbolValue
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from tests.errors import error_of

MATRIX: dict[str, SymbolValue] = {
    "TEST_MATRIX_MODE": True,
    "TEST_MATRIX_AXES": "COMPILE=n,y N_LAYER=1,2",
}
BOTH = "COMPILE=n,y"


@pytest.fixture
def planned(planned: Callable[..., Plan]) -> Callable[..., Plan]:
    custom = {"MODEL_SIZE_TINY": None, "MODEL_SIZE_CUSTOM": True}
    return partial(planned, RUN_PROFILE_MAXOUT_SPEED=True, **custom)


def test_a_compiled_run_is_planned_alone(planned: Callable[..., Plan]) -> None:
    (run,) = planned(COMPILE=True).runs
    assert run.config.machine.compile and run.label == "single/run s1"


@pytest.mark.parametrize("profile", [{}, {"RUN_PROFILE_MAXOUT_SPEED": None}], ids=["fast", "paper"])
def test_a_matrix_has_the_compiler_as_an_axis(
    planned: Callable[..., Plan], profile: dict[str, None]
) -> None:
    plan = planned(**MATRIX, **profile)
    assert [run.variant.slug for run in plan.runs] == [
        "compile-n-n-layer-1",
        "compile-n-n-layer-2",
        "compile-y-n-layer-1",
        "compile-y-n-layer-2",
    ]
    assert [run.config.machine.compile for run in plan.runs] == [False, False, True, True]
    # The compiler is declared, in every cell: it is the axis.
    axes = declared_axes(plan, [RunRecord(RunDir(run.path)) for run in plan.runs], "")
    assert [axes[run.path] for run in plan.runs] == 4 * [{"COMPILE", "N_LAYER"}]


def test_a_paper_compiles_only_beside_the_same_run_without_it(
    planned: Callable[..., Plan],
) -> None:
    paper = {"RUN_PROFILE_MAXOUT_SPEED": None}
    assert len(planned(sweep=BOTH, **paper).runs) == 2
    alone: list[dict[str, SymbolValue]] = [
        {"COMPILE": True},
        {**MATRIX, "TEST_MATRIX_AXES": "COMPILE=y N_LAYER=1,2"},
        {**MATRIX, "TEST_MATRIX_AXES": "N_LAYER=1,2", "COMPILE": True},
        {"RA_MLA_ABLATION_MODE": True, "RA_MLA_ABLATION_STEPS": "0,3", "COMPILE": True},
    ]
    for settings in alone:
        error = error_of(planned, **settings, **paper)
        assert error.codes == ["config.unpaired-compile"]
        assert 'SWEEP="COMPILE=n,y"' in str(error)
    assert error_of(planned, sweep="LEARNING_RATE=1e-3,2e-3", COMPILE=True, **paper).codes == [
        "config.unpaired-compile"
    ]
