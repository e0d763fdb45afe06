"""Plan and status on a terminal: stale runs, columns, and the time left."""

import json
import time

import pytest

from gpt2.study import view as planning_view
from gpt2.study.arguments import run_options
from lib.env.gpu import cpu_model
from lib.files import write_json
from lib.runs.code import installed_torch
from lib.runs.lease import take_lease
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import MANIFEST, write_run
from tests.options import options


@pytest.mark.parametrize(
    ("gpus", "selected", "jobs"),
    [(1, "", 4), (2, "", 2), (1, "2,3", 2), (8, "", 1)],
    ids=["one each", "two each", "selected", "too few"],
)
def test_the_time_left_counts_the_gpus_of_this_machine(
    planned, tmp_path, monkeypatch, gpus: int, selected: str, jobs: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr("lib.env.gpu._GPU_DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selected)
    batch = {"GLOBAL_BATCH": 8, "BATCH_SIZE": 1, "GRAD_ACCUMULATION": 8 // gpus, "GPUS": gpus}
    plan = planned(DEVICE_CUDA=True, DEVICE_CPU=None, seeds="1-8", **batch)
    rows = [{**row, "seconds_left": 60.0} for row in planning_view.look(plan)]
    assert f" of training left with JOBS={jobs}" in planning_view.summary_line(plan, rows)


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
    assert (done["state"], stale["state"]) == ("done", "stale")
    assert stale["changes"] == ["gpt2/model.py"] and stale["seconds_left"] == 0
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


FEATURES = "POSITIONS_ROPE RECIPROCAL MLP_ATTN_GATE"


@pytest.mark.parametrize("design", ["ADD_ONE_IN", "FACTORIAL", "LEAVE_ONE_OUT", "CUMULATIVE"])
def test_no_name_of_a_design_is_cut(planned, design: str) -> None:
    plan = planned(
        TEST_MATRIX_MODE=True, ABLATION_FEATURES=FEATURES, **{f"ABLATION_DESIGN_{design}": True}
    )
    titles = {run.variant.title for run in plan.runs}
    assert "POSITIONS_ROPE" in " ".join(titles) and not any("=" in title for title in titles)
    assert ("no feature" in titles) == (design != "LEAVE_ONE_OUT")
    text = planning_view.plan_text(plan, planning_view.look(plan), 80)
    assert "…" not in text and "title" not in text.splitlines()[0]
    assert all(run.label in text for run in plan.runs)


def test_after_a_resume_the_time_left_is_not_that_of_the_last_line(planned) -> None:
    (run,) = planned().runs
    directory = RunDir(run.path)
    run.path.mkdir(parents=True)
    with take_lease(directory, 60):
        row = {"iteration": 50, "tokens_per_second": 10.0, "eta_seconds": 300.0}
        stopped = time.time() - 3600
        line = json.dumps({**row, "written_at": stopped, "t": 0.0, "train_seconds": 300.0})
        directory.timing.write_text(f"{line}\n")
        write_status(directory, RunStatus(State.RUNNING, iteration=50, iterations=100))
        (view,) = planning_view.look(planned())
        assert view["state"] == "running" and view["seconds_left"] == pytest.approx(300.0, abs=20)
        status = json.loads(directory.status.read_text())
        write_json(directory.status, {**status, "written_at": stopped})
        (view,) = planning_view.look(planned())
        assert view["seconds_left"] == 0.0
