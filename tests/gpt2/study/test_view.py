"""Plan and status: size, cost, state and time left of each run, and their text."""

import json
import re
import time

import pytest

from gpt2.study import view
from gpt2.study.arguments import run_options
from gpt2.study.cost import evaluations
from gpt2.study.document import set_text
from gpt2.study.notes import note_lines, notes
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import parse_command_line_settings
from lib.env import speed
from lib.env.gpu import cpu_model
from lib.files import write_json
from lib.project import ROOT
from lib.runs.code import installed_torch
from lib.runs.lease import take_lease
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.gpt2.study.large_study import this_origin
from tests.lib.fabricated import MANIFEST, changed, seal, write_run
from tests.options import options

STUDY = {"RA_MLA_ABLATION_MODE": True}
ON_GPU = {"DEVICE_CUDA": True, "DEVICE_CPU": None}


def test_costs_are_those_of_the_configuration_and_fit_the_columns_of_a_terminal(planned):
    plan = planned(**STUDY)
    rows = view.look(plan)
    baseline, gate = rows[0], rows[3]
    assert baseline["parameters"] == plan.runs[0].config.model.num_params()
    assert baseline["tokens"] == 100 * 64 * 128 and baseline["state"] == "new"
    assert (baseline["ratio"], baseline["widths"]) == ("2.000", "M 512")
    assert gate["widths"] == "M 544/640 attn_gate 45/-"
    assert gate["delta"] == "golden + MLP_ATTN_GATE MLP_SHARE=0.15"
    for width in (80, 132):
        lines = view.plan_text(plan, rows, width).splitlines()
        # A path is not broken.
        assert [line for line in lines if len(line) > width and "/" not in line.strip()[1:]] == []
        assert "title" in lines[0] and ("FLOP/token" in lines[0]) == (width == 132)
    assert "delta" in view.plan_text(plan, rows).splitlines()[0]


@pytest.mark.parametrize(
    ("interval", "iterations", "expected"), [(0, 100, 1), (10, 101, 11), (100, 100, 1)]
)
def test_evaluations_are_the_periodic_ones_and_the_final_one(
    planned, interval, iterations, expected
):
    (run,) = planned(EVAL_INTERVAL=interval, MAX_ITERS=iterations).runs
    assert evaluations(run.config) == expected


def test_time_is_measured_where_done_and_scaled_by_cost_elsewhere(planned):
    plan = planned(steps="0,golden", **STUDY)
    directory = write_run(plan.runs[0].path)
    timing = {"tokens_per_second": 1000.0, "train_seconds": 7.0, "mean_step_seconds": 1.0}
    write_json(directory.summary, {"timing": timing})
    seal(directory, changed(MANIFEST, origin=this_origin()))
    write_status(directory, RunStatus(State.SUCCESS, iteration=100, iterations=100))
    done, other = view.look(plan)
    assert (done["seconds"], done["seconds_left"], done["state"]) == (7.0, 0.0, "done")
    cost = other["flops_per_token"] / done["flops_per_token"]
    assert other["seconds"] == pytest.approx(other["tokens"] / 1000.0 * cost)
    assert "2 runs, 1 done, about" in view.summary_line(plan, [done, other])


def test_before_a_first_run_time_is_a_guess_and_says_so(planned, monkeypatch):
    monkeypatch.setattr(speed, "_measure", lambda threads: 1e10 * threads)
    plan = planned(steps="0-1", **STUDY, CPU_THREADS=2)
    baseline, _ = rows = view.look(plan)
    assert baseline["seconds_from"] == "machine"
    flops = baseline["tokens"] * baseline["flops_per_token"]
    assert baseline["seconds"] == pytest.approx(flops / (0.65 * 2e10))
    lines = view.plan_text(plan, rows).splitlines()
    assert sum(" ~" in line for line in lines) == 2 and any(line[0:2] == "~ " for line in lines)


def test_the_speed_of_a_gpu_is_not_guessed_and_a_time_budget_is_its_own_estimate(planned):
    plan = planned(**ON_GPU)
    (row,) = rows = view.look(plan)
    assert (row["seconds"], row["seconds_from"]) == (None, "unknown")
    text = view.plan_text(plan, rows)
    assert "~" not in text and any(line.startswith("- ") for line in text.splitlines())
    (row,) = view.look(planned(MAX_ITERS=None, BUDGET_TIME=True, GPT2_MAX_TIME=60))
    assert (row["tokens"], row["seconds"]) == (None, 60.0)


def test_a_matrix_product_is_timed_on_as_many_threads_as_a_run_has():
    assert 1e8 < speed._measure(1) < 1e13


def test_a_running_state_requires_a_live_process(planned):
    plan = planned(steps="0-2", **STUDY)
    for run, state in zip(plan.runs, (State.RUNNING, State.RUNNING, State.FAILED), strict=True):
        run.path.mkdir(parents=True)
        write_status(RunDir(run.path), RunStatus(state, iteration=50, iterations=100))
    running = RunDir(plan.runs[0].path)
    row = {"iteration": 52, "tokens_per_second": 1.0, "written_at": time.time()}
    running.timing.write_text(json.dumps({**row, "eta_seconds": 2000.0}) + "\n" + '{"torn')
    with take_lease(running, 60):
        rows = view.look(plan)
        assert [row["state"] for row in rows] == ["running", "interrupted", "failed"]
        assert [row["iteration"] for row in rows] == [52, 50, 50]
        assert 1800 < rows[0]["seconds_left"] < 2000
        # A line from before the run was resumed, and a run that takes longer than expected.
        stopped = time.time() - 3600
        row |= {"eta_seconds": 300.0, "written_at": stopped}
        running.timing.write_text(json.dumps(row) + "\n")
        assert view.look(plan)[0]["seconds_left"] == pytest.approx(300.0, abs=20)
        status = json.loads(running.status.read_text())
        write_json(running.status, {**status, "written_at": stopped})
        assert view.look(plan)[0]["seconds_left"] == 0.0


@pytest.mark.parametrize(
    ("bf16", "native", "emulated"), [(True, True, 0), (True, False, 1), (False, False, 0)]
)
def test_emulated_bf16_is_a_warning_and_its_time_unknown(
    planned, monkeypatch, bf16, native, emulated
):
    monkeypatch.setattr(speed, "has_bf16_instructions", lambda: native)
    monkeypatch.setattr(speed, "_measure", lambda threads: 1e10)
    settings = {"PRECISION_BF16": True, "PRECISION_WHY": "a test"} if bf16 else {}
    plan = planned(WARMUP_STEPS=1, **settings)
    assert [note.warns for note in notes(plan.runs[0].config)] == [True] * emulated
    assert view.look(plan)[0]["seconds_from"] == ("unknown" if emulated else "machine")


@pytest.mark.parametrize(("iterations", "warned"), [(100, True), (101, False)])
def test_a_run_that_ends_in_its_warm_up_is_a_warning(planned, iterations, warned):
    (run,) = planned(MAX_ITERS=iterations, WARMUP_STEPS=100).runs
    assert [note.warns for note in notes(run.config)] == [True] * warned
    assert len(note_lines([("a", run.config), ("b", run.config)])) == warned


def test_pairs_and_reads_are_listed_where_runs_differ_in_them(planned):
    """Of full attention T/2 and T, of a window w less what the first tokens lack, and w."""
    plan = planned(**STUDY, ABLATION_STUDY_MECHANISMS=True, steps="0,3,4")
    rows = view.look(plan)
    found = [(row["pairs_per_token"], row["reads"]) for row in rows]
    assert found == [(64.5, 128), (48.25, 64), (64.5, 128)]
    assert re.search(" pairs +reads ", view.plan_text(plan, rows).splitlines()[0])
    assert "pairs" not in view.plan_text(plan.only("0"), rows[:1])


def test_a_plan_says_where_native_sparse_attention_does_not_pay(planned):
    chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    plan = planned(**chosen, SEED_LIST="1,2", WARMUP_STEPS=0)
    rows = view.look(plan)
    text = view.plan_text(plan, rows)
    assert "\nWARN  single/run s1 +1: selection takes every block: NSA_SELECT_COUNT=16" in text
    assert "full attention / NSA: 0.49, so full attention does less\n" in text
    assert len(json.loads(view.to_json(plan, rows))["notes"]) == 2


@pytest.mark.parametrize(
    ("gpus", "selected", "jobs"),
    [(2, "", 2), (1, "2,3", 2), (8, "", 1)],
    ids=["two each", "selected", "too few"],
)
def test_the_time_left_counts_the_gpus_of_this_machine(
    planned, tmp_path, monkeypatch, gpus, selected, jobs
):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr("lib.env.gpu._GPU_DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selected)
    batch = {"GLOBAL_BATCH": 8, "BATCH_SIZE": 1, "GRAD_ACCUMULATION": 8 // gpus, "GPUS": gpus}
    plan = planned(**ON_GPU, seeds="1-8", **batch)
    rows = [{**row, "seconds_left": 60.0} for row in view.look(plan)]
    assert f" of training left with JOBS={jobs}" in view.summary_line(plan, rows)


@pytest.mark.parametrize("settings", [{}, ON_GPU], ids=["cpu", "cuda"])
def test_stale_runs_are_named_once_with_what_changed(planned, settings):
    plan = planned(seeds="1,2", **settings)
    # The model of a GPU is not compared, because reading it imports torch.
    origin = {"torch": installed_torch(), "device": "some GPU" if settings else cpu_model()}
    for run, sources in zip(plan.runs, ({}, {"gpt2/model.py": "0" * 64}), strict=True):
        write_run(run.path, manifest={**MANIFEST, "origin": {**origin, "sources": sources}})
    done, stale = view.look(plan)
    assert (done["state"], stale["state"]) == ("done", "stale")
    assert stale["changes"] == ["gpt2/model.py"] and stale["seconds_left"] == 0
    for text in (view.plan_text, view.status_text):
        shown = text(plan, [done, stale])
        assert shown.count("gpt2/model.py") == 1 and "1 done, 1 stale" in shown


def test_the_treatment_of_stale_runs_is_remembered_and_overridden(planned):
    study = planned(ON_STALE_KEEP=True).base.study
    assert run_options(options("all"), study).stale == "keep"
    assert run_options(options("all", "--on-stale", "stop"), study).stale == "stop"
    assert run_options(options("all"), planned().base.study).stale == "stop"


def test_the_command_of_a_report_repeats_settings_of_every_type(tree):
    """Choices, also those whose members lack the prefix, bools, numbers and text with spaces."""
    settings = {
        "RUN_MODE": "test_matrix_mode",
        "ABLATION_DESIGN": "factorial",
        "ABLATION_FEATURES": "RECIPROCAL MLP_SIZING_RATIO+MLP_RATIO=2.5",
        "MODEL_SIZE": "custom",
        "N_LAYER": 3,
        "COMPILE": False,
        "LEARNING_RATE": "4e-3",
        "OUTPUT_DIR": "it's $HOME",
    }
    layers = defconfig_layers(ROOT, "gpt2-ratio-small")
    layer = parse_command_line_settings(set_text(settings))
    values = tree.resolve([*layers, layer]).values
    assert {name: values[name] for name in settings} == settings
