"""Plan and status on a terminal: stale runs and columns."""

import pytest

from gpt2.study import view as planning_view
from gpt2.study.arguments import run_options
from lib.env.gpu import cpu_model
from lib.runs.code import installed_torch
from tests.lib.fabricated import MANIFEST, write_run
from tests.options import options


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stale_runs_are_named_once_with_what_changed(planned, device: str) -> None:
    settings = {"DEVICE_CUDA": True, "DEVICE_CPU": None} if device == "cuda" else {}
    plan = planned(seeds="1,2", **settings)
    # The model of a GPU is not compared, because reading it imports torch.
    model = cpu_model() if device == "cpu" else "some GPU"
    origin = {"torch": installed_torch(), "device": model}
    for run, sources in zip(plan.runs, ({}, {"gpt2/model.py": "0" * 64}), strict=True):
        write_run(run.path, manifest={**MANIFEST, "origin": {**origin, "sources": sources}})
    done, stale = planning_view.look(plan)
    assert (done.state, stale.state) == ("done", "stale")
    assert stale.changes == ["gpt2/model.py"] and stale.seconds_left == 0
    for text in (planning_view.plan_text, planning_view.status_text):
        shown = text(plan, [done, stale])
        assert shown.count("gpt2/model.py") == 1 and "1 done, 1 stale" in shown


def test_the_treatment_of_stale_runs_is_remembered_and_overridden(planned) -> None:
    study = planned(ON_STALE_KEEP=True).base.study
    assert run_options(options("all"), study).stale == "keep"
    assert run_options(options("all", "--on-stale", "stop"), study).stale == "stop"
    assert run_options(options("all"), planned().base.study).stale == "stop"


def test_a_plan_fits_the_columns_of_a_terminal(planned) -> None:
    plan = planned(RA_MLA_ABLATION_MODE=True)
    views = planning_view.look(plan)
    for width in (80, 132):
        lines = planning_view.plan_text(plan, views, width).splitlines()
        # A path is not broken.
        assert [line for line in lines if len(line) > width and "/" not in line.strip()[1:]] == []
        assert "title" in lines[0] and ("FLOP/token" in lines[0]) == (width == 132)
    assert "delta" in planning_view.plan_text(plan, views).splitlines()[0]
