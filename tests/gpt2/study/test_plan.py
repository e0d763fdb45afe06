"""Plans of a build folder's .config: runs, costs and states, without torch or training."""

import io
import json
import re
import subprocess
import sys
import time

import pytest

from gpt2.config import _with_threads
from gpt2.study import view as planning_view
from gpt2.study.notes import note_lines, notes
from gpt2.study.plan import (
    Plan,
    config_layers,
    declared_verdicts,
    make_plan,
    step_layers,
    table_plan,
    with_runs,
)
from gpt2.study.study_file import RATIO
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import parse_command_line_settings
from lib.env import speed
from lib.errors import ConfigError
from lib.files import write_json
from lib.project import ROOT
from lib.report.options import LookPlan
from lib.report.study import read_study
from lib.runs.lease import take_lease
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.errors import error_of
from tests.gpt2.study.large_study import this_origin
from tests.lib.fabricated import MANIFEST, changed, seal, write_run
from tests.lib.report.fabricated_study import write_planned


def finish(run, tokens_per_second: float, train_seconds: float) -> None:
    """Write the files of a finished run."""
    directory = write_run(run.path)
    timing = {"tokens_per_second": tokens_per_second, "train_seconds": train_seconds}
    timing["mean_step_seconds"] = 1.0
    write_json(directory.summary, {"timing": timing})
    seal(directory, changed(MANIFEST, origin=this_origin()))
    write_status(directory, RunStatus(State.SUCCESS, iteration=100, iterations=100))


def test_a_study_is_its_steps_and_seeds(planned):
    plan = planned(RA_MLA_ABLATION_MODE=True, SEED_LIST="1,2")
    assert len(plan.runs) == 38
    assert [run.config.seed for run in plan.runs] == [1] * 19 + [2] * 19
    assert plan.runs[7].label == "ratio/07-ra-golden-mech s1"
    assert plan.runs[7].path == plan.build_dir / "results/ratio" / plan.runs[7].path.name
    assert plan.runs[7].path.name == f"ra-golden-mech-s1-{plan.runs[7].config.hash8}"


def test_steps_and_seeds_can_be_chosen(planned):
    plan = planned(steps="0,ra*", seeds="5", RA_MLA_ABLATION_MODE=True)
    slugs = [run.variant.slug for run in plan.runs]
    assert slugs[:3] == ["baseline", "ra", "ra-golden"] and slugs[-1] == "ract-entropy"
    assert {run.seed for run in plan.runs} == {5}


def test_one_training_is_one_run(planned):
    plan = planned(SEED=4)
    (run,) = plan.runs
    assert (run.label, run.seed, plan.study) == ("single/run s4", 4, "single")


STUDY = {"RA_MLA_ABLATION_MODE": True}


@pytest.mark.parametrize(
    ("options", "code", "where"),
    [
        ({"seeds": "5,5"}, "usage.duplicate-seed", "SEEDS"),
        ({"steps": "3"}, "config.conflict", "STEPS"),
        ({**STUDY, "steps": "0", "sweep": "DROPOUT=0.1"}, "config.conflict", "STEPS"),
        ({**STUDY, "steps": "0,1", "seeds": "auto"}, "config.conflict", "STEPS"),
        ({"DROPOUT": "2"}, "config.out-of-range", ".config:"),
        ({"sweep": "NO_SUCH=1"}, "config.unknown-symbol", "SWEEP"),
        ({"sweep": "DROPOUT=0.1,7"}, "config.out-of-range", "SWEEP dropout-7"),
    ],
)
def test_a_plan_is_refused(planned, options, code, where):
    error = error_of(planned, **options)
    assert error.codes == [code] and where in error.problems[0].where


def test_a_step_of_a_study_and_the_same_single_training_are_the_same_configuration(planned):
    step = planned(steps="ra", RA_MLA_ABLATION_MODE=True).runs[0]
    changes = {"RECIPROCAL": True, "RECIPROCAL_WINDOW": 64, "CPU_THREADS": 1}
    single = planned(**changes, OUTPUT_DIR="elsewhere").runs[0]
    assert step.config.hash8 == single.config.hash8


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({}, 7),
        ({"GPUS": 2}, 3),
        ({"GPUS": 8}, 1),
        ({"DEVICE": "cuda"}, 1),
        ({"RUN_MODE": "ra_mla_ablation_mode"}, 1),
        ({"CPU_THREADS": 4}, 4),
        ({"CPU_THREADS": 4, "RUN_MODE": "ra_mla_ablation_mode"}, 4),
    ],
)
def test_only_a_single_training_on_a_cpu_uses_all_cores(monkeypatch, changes, threads):
    monkeypatch.setattr("gpt2.config.usable_cores", lambda: 7)
    alone = {"CPU_THREADS": 0, "GPUS": 1, "DEVICE": "cpu", "RUN_MODE": "single_training"}
    assert _with_threads({**alone, **changes})["CPU_THREADS"] == threads


def test_a_matrix_is_planned_from_its_axes(planned):
    plan = planned(TEST_MATRIX_MODE=True)
    slugs = [run.variant.slug for run in plan.runs]
    assert slugs == ["adamw-none", "adamw-magnitude", "adamwspam-none", "adamwspam-magnitude"]
    assert plan.runs[3].config.optimizer.name == "adamwspam"
    assert plan.study == "matrix" and not plan.left_out


def test_a_sweep_is_a_list_of_trainings_whatever_the_configuration_is(planned):
    plan = planned(RA_MLA_ABLATION_MODE=True, sweep="LEARNING_RATE=1e-3,3e-3 DROPOUT=0.2")
    assert plan.study == "sweep" and plan.folder.name == "sweep"
    rates = [run.config.schedule.learning_rate for run in plan.runs]
    assert rates == [1e-3, 3e-3] and plan.runs[0].config.model.shape.dropout == 0.2


def test_a_swept_batch_keeps_the_global_batch(planned):
    plan = planned(sweep="BATCH_SIZE=4,8,16")
    found = [(r.config.train.batch_size, r.config.train.grad_accumulation) for r in plan.runs]
    assert found == [(4, 16), (8, 8), (16, 4)]
    with pytest.raises(ConfigError, match="BATCH_SIZE=5 x GRAD_ACCUMULATION=12 x GPUS=1 is 60"):
        planned(sweep="BATCH_SIZE=4,5")
    plan = planned(sweep="GLOBAL_BATCH=32,64")
    assert [r.config.train.grad_accumulation for r in plan.runs] == [4, 8]


def test_very_many_combinations_need_a_yes(planned, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    rates = ",".join(f"0.{i:02}" for i in range(20))
    axes = f"N_LAYER={','.join(map(str, range(1, 49)))} DROPOUT={rates}"
    error = error_of(planned, TEST_MATRIX_MODE=True, TEST_MATRIX_AXES=axes)
    assert error.codes == ["usage.no-terminal"]
    assert "960" in str(error) and "YES=1" in str(error)


def test_a_design_is_planned_from_its_features(planned):
    features = "RECIPROCAL MLP_SIZING_RATIO+MLP_RATIO=2.5 ATTENTION_PROJECTION_LATENT MLP_LATENT"
    plan = planned(
        TEST_MATRIX_MODE=True, ABLATION_DESIGN_ADD_ONE_IN=True, ABLATION_FEATURES=features
    )
    slugs = [run.variant.slug for run in plan.runs]
    assert slugs == ["none", "reciprocal", "mlp-sizing-ratio", "attention-projection-latent"]
    (skipped,) = plan.left_out
    assert skipped.code == "config.unmet-dependency"
    assert "mlp-latent" in str(skipped) and "ATTENTION_PROJECTION_LATENT=y" in str(skipped)
    assert plan.runs[2].config.model.mlp.built_ratio(plan.runs[2].config.model.sites()[0]) > 2.4


def test_a_full_design_is_planned_and_gets_the_factorial_rule(planned):
    features = "RECIPROCAL RA_CROSS_TOKEN MLP_ATTN_GATE"
    matrix = {"TEST_MATRIX_MODE": True, "ABLATION_FEATURES": features}
    plan = planned(**matrix, ABLATION_DESIGN_FACTORIAL=True)
    assert len(plan.runs) == 8 and not plan.left_out
    assert plan.runs[0].variant.slug == "none"
    declared = declared_verdicts(plan)
    assert (declared.interactions, declared.rule.variance) == (True, "factorial")
    names = [contrast.name for contrast in declared.declared]
    assert names == ["A RECIPROCAL", "B RA_CROSS_TOKEN", "C MLP_ATTN_GATE", "AB", "AC", "BC"]
    other = declared_verdicts(planned(**matrix, ABLATION_DESIGN_ADD_ONE_IN=True))
    assert (other.interactions, other.rule.variance) == (None, "shared")
    own = planned(**matrix, ABLATION_DESIGN_FACTORIAL=True, VERDICT_VARIANCE_OWN=True)
    assert declared_verdicts(own).rule.variance == "own"


def test_a_changed_setting_gives_new_directories_and_a_changed_folder_none(planned):
    paths = [
        planned(**settings).runs[0].path.name for settings in ({}, {"BLOCK_SIZE": 64}, {"JOBS": 2})
    ]
    assert paths[0] != paths[1] and paths[0] == paths[2]


def test_patterns_choose_runs(planned):
    plan = planned(RA_MLA_ABLATION_MODE=True)
    assert [run.variant.number for run in plan.matching("mla,7")] == [7, 8]
    error = error_of(plan.matching, "mla,nothing-like-it")
    assert error.codes == ["run.not-found"] and "'nothing-like-it'" in str(error)
    assert error_of(plan.matching, " ,").codes == ["usage.missing-argument"]


def test_without_a_config_the_step_comes_from_the_studys_own_defconfig(tmp_path):
    settings = [parse_command_line_settings(["OPTIMIZER_ADAMW=y", "DEVICE_CPU=y"])]
    plan = make_plan(step_layers(tmp_path, settings), tmp_path, steps="mla")
    (run,) = plan.runs
    assert run.config.optimizer.name == "adamw"
    assert run.config.model.shape.n_embd == 768
    assert list(tmp_path.iterdir()) == []


def test_a_table_keeps_the_rest_of_the_study_that_has_begun(configure):
    build = configure(RA_MLA_ABLATION_MODE=True)
    layers = config_layers(build)
    whole = make_plan(layers, build)
    whole.runs[0].path.mkdir(parents=True)
    plan = make_plan(layers, build, steps="7")
    assert [run.variant.number for run in table_plan(plan).runs] == [0, 7]


def test_costs_are_those_of_the_configuration(planned):
    plan = planned(RA_MLA_ABLATION_MODE=True)
    views = planning_view.look(plan)
    baseline, gate = views[0], views[3]
    assert baseline["parameters"] == plan.runs[0].config.model.num_params()
    assert baseline["tokens"] == 100 * 64 * 128
    assert (baseline["ratio"], baseline["widths"]) == ("2.000", "M 512")
    assert gate["widths"] == "M 544/640 attn_gate 45/-"
    assert gate["delta"] == "golden + MLP_ATTN_GATE MLP_SHARE=0.15"
    assert baseline["state"] == "new"


def test_time_is_measured_where_done_and_scaled_by_cost_elsewhere(planned):
    plan = planned(steps="0,golden", RA_MLA_ABLATION_MODE=True)
    finish(plan.runs[0], tokens_per_second=1000.0, train_seconds=7.0)
    done, other = planning_view.look(plan)
    assert (done["seconds"], done["seconds_left"], done["state"]) == (7.0, 0.0, "done")
    cost = other["flops_per_token"] / done["flops_per_token"]
    assert other["seconds"] == pytest.approx(other["tokens"] / 1000.0 * cost)
    assert "2 runs, 1 done, about" in planning_view.summary_line(plan, [done, other])


def test_before_a_first_run_time_is_a_guess_and_says_so(planned, monkeypatch):
    monkeypatch.setattr(speed, "_measure", lambda threads: 1e10 * threads)
    settings = {"RA_MLA_ABLATION_MODE": True, "DEVICE_CPU": True, "CPU_THREADS": 2}
    plan = planned(steps="0-1", **settings)
    baseline, _ = views = planning_view.look(plan)
    assert baseline["seconds_from"] == "machine"
    flops = baseline["tokens"] * baseline["flops_per_token"]
    assert baseline["seconds"] == pytest.approx(flops / (0.65 * 2e10))
    lines = planning_view.plan_text(plan, views).splitlines()
    assert sum(" ~" in line for line in lines) == 2 and any(line[0:2] == "~ " for line in lines)


def test_the_speed_of_a_gpu_is_not_guessed(planned):
    plan = planned(steps="0-1", RA_MLA_ABLATION_MODE=True, DEVICE_CPU=None)
    baseline, _ = views = planning_view.look(plan)
    assert (baseline["seconds"], baseline["seconds_from"]) == (None, "unknown")
    text = planning_view.plan_text(plan, views)
    assert "~" not in text and any(line.startswith("- ") for line in text.splitlines())


def test_a_matrix_product_is_timed_on_as_many_threads_as_a_run_has():
    assert 1e8 < speed._measure(1) < 1e13


def test_a_time_budget_is_its_own_estimate(planned):
    (view,) = planning_view.look(planned(MAX_ITERS=None, BUDGET_TIME=True, GPT2_MAX_TIME=60))
    assert (view["tokens"], view["seconds"]) == (None, 60.0)


def test_a_running_state_requires_a_live_process(planned):
    plan = planned(steps="0-2", RA_MLA_ABLATION_MODE=True)
    for run, state in zip(plan.runs, (State.RUNNING, State.RUNNING, State.FAILED), strict=True):
        run.path.mkdir(parents=True)
        write_status(RunDir(run.path), RunStatus(state, iteration=50, iterations=100))
    running = RunDir(plan.runs[0].path)
    record = {"iteration": 52, "tokens_per_second": 1.0, "written_at": time.time()}
    record["eta_seconds"] = 2000.0
    running.timing.write_text(json.dumps(record) + "\n" + '{"torn')
    with take_lease(running, 60):
        views = planning_view.look(plan)
    assert [view["state"] for view in views] == ["running", "interrupted", "failed"]
    assert [view["iteration"] for view in views] == [52, 50, 50]
    assert views[0]["seconds_left"] is not None and 1800 < views[0]["seconds_left"] < 2000


@pytest.mark.parametrize("native", [True, False])
def test_emulated_bf16_is_a_warning_and_its_time_unknown(planned, monkeypatch, native):
    monkeypatch.setattr(speed, "has_bf16_instructions", lambda: native)
    monkeypatch.setattr(speed, "_measure", lambda threads: 1e10)
    in_bf16 = {"PRECISION_BF16": True, "PRECISION_WHY": "a test"}
    for bf16 in (True, False):
        plan = planned(WARMUP_STEPS=1, **(in_bf16 if bf16 else {}))
        (run,) = plan.runs
        emulated = bf16 and not native
        assert [note.warns for note in notes(run.config)] == [True] * emulated
        assert len(note_lines([("a", run.config)])) == emulated
        (view,) = planning_view.look(plan)
        assert view["seconds_from"] == ("unknown" if emulated else "machine")


@pytest.mark.parametrize(("iterations", "warned"), [(100, True), (101, False)])
def test_a_run_that_ends_in_its_warm_up_is_a_warning(planned, iterations, warned):
    (run,) = planned(MAX_ITERS=iterations, WARMUP_STEPS=100).runs
    assert [note.warns for note in notes(run.config)] == [True] * warned
    assert len(note_lines([("a", run.config), ("b", run.config)])) == warned


def test_plan_loads_no_torch_and_writes_nothing(configure):
    build = configure(RA_MLA_ABLATION_MODE=True)
    before = sorted(build.rglob("*"))
    code = (
        "import sys; from lib.kablate import main\n"
        "try: main()\n"
        "finally: sys.stderr.write(f'torch={\"torch\" in sys.modules}')"
    )
    command = [sys.executable, "-c", code, "plan", "-O", str(build)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=build)
    assert found.returncode == 0, found.stderr
    assert all(f"{RATIO.label(step)} s1" in found.stdout for step in RATIO.steps)
    count = len(RATIO.steps)
    assert f"ratio study (paper_repro), {count} x 1 seed, {count} runs, 0 done" in found.stdout
    assert "torch=False" in found.stderr
    assert sorted(build.rglob("*")) == before


def test_pairs_and_reads_are_listed_where_runs_differ_in_them(planned):
    """Of full attention T/2 and T, of a window w less what the first tokens lack, and w."""
    plan = planned(RA_MLA_ABLATION_MODE=True, ABLATION_STUDY_MECHANISMS=True, steps="0,3,4")
    views = planning_view.look(plan)
    assert [(v["pairs_per_token"], v["reads"]) for v in views] == [
        (64.5, 128),
        (48.25, 64),
        (64.5, 128),
    ]
    heading, *_ = planning_view.plan_text(plan, views).splitlines()
    assert re.search(" pairs +reads ", heading)
    assert "pairs" not in planning_view.plan_text(planned(), planning_view.look(planned()))


def test_a_plan_says_where_native_sparse_attention_does_not_pay(planned):
    chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    plan = planned(**chosen, SEED_LIST="1,2", WARMUP_STEPS=0)
    text = planning_view.plan_text(plan, planning_view.look(plan))
    assert "\nWARN  single/run s1 +1: selection takes every block: NSA_SELECT_COUNT=16" in text
    assert "full attention / NSA: 0.49, so full attention does less\n" in text
    assert len(json.loads(planning_view.to_json(plan, planning_view.look(plan)))["notes"]) == 2


def test_one_command_measures_nine_runs_of_native_sparse_attention(tmp_path):
    plan = make_plan(defconfig_layers(ROOT, "nsa-perf"), tmp_path)
    found = [(r.config.model.shape.block_size, r.config.values["NSA_RANGES"]) for r in plan.runs]
    assert found == [(s, r) for s in (512, 1024, 2048) for r in ("lists", "merged", "adaptive")]
    assert {run.config.train.max_iters for run in plan.runs} == {200}
    assert plan.left_out == []


def test_a_run_of_another_seed_is_the_run_that_kconfig_resolves(planned):
    """A block is resolved once, for the first seed."""
    both = planned(seeds="3,4294967295", RA_MLA_ABLATION_MODE=True, RA_MLA_ABLATION_STEPS="0,7")
    direct = planned(seeds="4294967295", RA_MLA_ABLATION_MODE=True, RA_MLA_ABLATION_STEPS="0,7")
    copied = [run for run in both.runs if run.seed != 3]
    assert [run.config for run in copied] == [run.config for run in direct.runs]
    assert [run.config.values for run in copied] == [run.config.values for run in direct.runs]
    assert [run.path for run in copied] == [run.path for run in direct.runs]
    assert len({run.config.hash8 for run in both.runs}) == 4
    assert error_of(planned, seeds="3,4294967296", RA_MLA_ABLATION_MODE=True).codes == [
        "config.out-of-range"
    ]


def test_a_plan_of_known_configurations_is_that_of_resolved_ones(configure):
    build = configure(RA_MLA_ABLATION_MODE=True, RA_MLA_ABLATION_STEPS="0,7")
    layers = config_layers(build)
    part = make_plan(layers, build, steps="7", seeds="5")
    for steps, seeds in (("all", "1-4"), ("", "2,5")):
        known = with_runs(part, steps, seeds)
        new = make_plan(layers, build, steps=steps, seeds=seeds)
        assert known.runs == new.runs and known.variants == new.variants
        assert [run.config.values for run in known.runs] == [r.config.values for r in new.runs]
        assert known.looks == new.looks and known.folder == new.folder
    assert error_of(with_runs, part, seeds="5,4294967296").codes == ["config.out-of-range"]


# A width at which the golden steps have no exact ratio.
NARROW = {
    "MODEL_SIZE_TINY": None,
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 2,
    "N_HEAD": 2,
    "N_EMBD": 64,
}


def test_selected_steps_are_planned_although_others_do_not_fit(configure):
    build = configure(RA_MLA_ABLATION_MODE=True, **NARROW)
    layers = config_layers(build)
    plan = make_plan(layers, build, steps="0,ra")
    assert [run.variant.slug for run in plan.runs] == ["baseline", "ra"]
    (problem,) = plan.left_out
    assert problem.code == "config.ratio-unreachable" and problem.where == "02-golden"
    # The whole study, its table, and a step that does not fit.
    assert len(table_plan(plan).runs) == 2
    for steps in ("", "0,golden"):
        assert set(error_of(make_plan, layers, build, steps=steps).codes) == {
            "config.ratio-unreachable"
        }


# SEEDS=auto.

AUTO = {
    "RA_MLA_ABLATION_MODE": True,
    "RA_MLA_ABLATION_STEPS": "0-3",
    "VERDICT_AA": False,
    "VERDICT_VARIANCE_OWN": True,
}


def looked(plan: Plan, waiting: str, effect: float = 2.5) -> None:
    """Finish the runs of the plan, and take its look; ``waiting`` is much noisier than the others."""
    for run in plan.runs:
        offset = -0.5 * (run.variant.number or 0)
        if run.variant.slug == waiting:
            offset = effect + 0.6 * (run.seed % 3 - 1)
        if not run.path.exists():
            own = {**MANIFEST, "run": {"hash8": run.config.hash8}}
            values = run.config.values
            write_planned(
                run, 60, 10, symbols=values, manifest=own, offset=0.05 * run.seed + offset
            )
    read_study(plan.study, plan.runs, plan=declared_verdicts(plan))


def trained(plan: Plan) -> dict[int, list[str]]:
    """Return the slugs of each seed."""
    blocks: dict[int, list[str]] = {}
    for run in plan.runs:
        blocks.setdefault(run.seed, []).append(run.variant.slug)
    return blocks


def test_auto_plans_the_first_look_for_every_step(planned):
    plan = planned(seeds="auto", **AUTO, SEED=7)
    assert list(trained(plan)) == [7, 8, 9] and len(plan.runs) == 12
    assert plan.auto.looks == (3, 5, 8) and plan.auto.most_later_runs == 20
    text = planning_view.plan_text(plan, planning_view.look(plan))
    assert "look 1 at 3 seeds; then at most 20 more runs, until 8 seeds" in text
    fields = json.loads(planning_view.to_json(plan, planning_view.look(plan)))
    assert (fields["looks"]["seeds"], fields["schema_version"]) == ([3, 5, 8], 1)
    assert [run["label"] for run in fields["runs"]] == [run.label for run in plan.runs]


def test_auto_plans_only_the_steps_of_open_comparisons_after_a_look(planned, configure):
    plan = planned(seeds="auto", **AUTO)
    baseline, pruned, golden, chained = (v.slug for v in plan.variants)
    parent = next(v.parent for v in plan.variants if v.slug == chained)
    looked(plan, chained)
    plan = planned(seeds="auto", **AUTO)
    assert trained(plan)[3] == [baseline, pruned, golden, chained]
    expected = [v for v in (baseline, pruned, golden, chained) if v in {baseline, parent, chained}]
    assert trained(plan)[4] == trained(plan)[5] == expected and len(trained(plan)) == 5
    assert plan.auto.number == 2 and plan.auto.most_later_runs == 3 * len(expected)
    looked(plan, chained)
    plan = planned(seeds="auto", **AUTO)
    assert plan.auto.looks == () and len(trained(plan)) == 5 and trained(plan)[5] == expected
    text = planning_view.plan_text(plan, planning_view.look(plan))
    assert "no look left after 5 seeds" in text


def test_auto_goes_on_after_a_fixed_list_with_the_reserve(planned):
    plan = planned(seeds="1-5", **AUTO)
    assert plan.looks == LookPlan((5,), (0.9,))
    looked(plan, plan.variants[1].slug, 0.0)
    plan = planned(seeds="auto", **AUTO)
    assert plan.auto.looks == (8,) and trained(plan)[8] == [v.slug for v in plan.variants[:2]]


@pytest.mark.parametrize(
    "settings, code",
    [
        ({"SINGLE_TRAINING": True}, "config.conflict"),
        ({"FINALIST_MIN_SEEDS": 4}, "config.conflict"),
        ({"VERDICT_LOOKS": "8,5,3"}, "config.out-of-range"),
        ({"VERDICT_LOOKS": "3,five,8"}, "config.wrong-type"),
    ],
)
def test_auto_is_refused_with_looks_that_cannot_be_held(planned, settings, code):
    study = {} if "SINGLE_TRAINING" in settings else AUTO
    assert error_of(planned, seeds="auto", **study, **settings).codes == [code]


def test_auto_plans_matrices_and_sweeps(planned):
    matrix = {"TEST_MATRIX_MODE": True, "TEST_MATRIX_AXES": "LEARNING_RATE=1e-3,1e-4"}
    assert len(planned(seeds="auto", **matrix).runs) == 6
    assert len(planned(seeds="auto", sweep="LEARNING_RATE=1e-3,1e-4,2e-4").runs) == 9


def test_the_whole_study_is_judged_whatever_steps_are_selected(planned):
    plan = planned(steps="0,1", seeds="1-3", **AUTO)
    assert len(plan.runs) == 6 and len(plan.variants) == 4
