"""Plans of a build folder's .config: which runs, with which configurations, and SEEDS=auto."""

import json

import pytest

from gpt2.check.cases import config_layers_to_check
from gpt2.config import _with_threads
from gpt2.study import view
from gpt2.study.plan import (
    config_layers,
    declared_verdicts,
    make_plan,
    table_plan,
    with_runs,
)
from gpt2.study.study_file import RATIO
from lib.config.layers import parse_command_line_settings
from lib.kablate import call
from lib.report.options import LookPlan
from lib.report.study import read_study
from tests.errors import error_of
from tests.lib.fabricated import MANIFEST
from tests.lib.report.fabricated_study import write_planned

STUDY = {"RA_MLA_ABLATION_MODE": True}
SPARSITY = "PRUNING=none,magnitude PRUNING_SPARSITY=0.5,1.5"


def test_a_study_is_its_steps_and_seeds(planned):
    plan = planned(**STUDY, SEED_LIST="1,2")
    assert [run.config.seed for run in plan.runs] == [1] * 19 + [2] * 19
    assert plan.runs[7].label == "ratio/07-ra-golden-mech s1"
    assert plan.runs[7].path.parent == plan.build_dir / "results/ratio"
    assert plan.runs[7].path.name == f"ra-golden-mech-s1-{plan.runs[7].config.hash8}"
    assert [run.variant.number for run in plan.matching("mla,7")] == [7, 8] * 2
    error = error_of(plan.matching, "mla,nothing-like-it")
    assert error.codes == ["run.not-found"] and "'nothing-like-it'" in str(error)
    assert error_of(plan.matching, " ,").codes == ["usage.missing-argument"]
    part = planned(**STUDY, steps="0,ra*", seeds="5")
    chosen = ["baseline", "ra", "ra-golden"]
    assert [(run.variant.slug, run.seed) for run in part.runs[:3]] == [(name, 5) for name in chosen]


def test_one_training_is_one_run_of_the_same_configuration_as_a_step(planned):
    (step,) = planned(steps="ra", seeds="4", **STUDY).runs
    changes = {"RECIPROCAL": True, "RECIPROCAL_WINDOW": 64, "CPU_THREADS": 1}
    plan = planned(**changes, SEED=4, OUTPUT_DIR="elsewhere")
    (run,) = plan.runs
    assert (run.label, run.seed, plan.study) == ("single/run s4", 4, "single")
    assert step.config.hash8 == run.config.hash8


@pytest.mark.parametrize(
    ("options", "code", "where"),
    [
        ({"seeds": "5,5"}, "usage.duplicate-seed", "SEEDS"),
        ({**STUDY, "seeds": "3,4294967296"}, "config.out-of-range", "SEEDS"),
        ({"steps": "3"}, "config.conflict", "STEPS"),
        ({**STUDY, "steps": "0", "sweep": "DROPOUT=0.1"}, "config.conflict", "STEPS"),
        ({**STUDY, "steps": "0,1", "seeds": "auto"}, "config.conflict", "STEPS"),
        ({"DROPOUT": "2"}, "config.out-of-range", ".config:"),
        ({"sweep": "NO_SUCH=1"}, "config.unknown-symbol", "SWEEP"),
        ({"sweep": "DROPOUT=0.1,7"}, "config.out-of-range", "SWEEP dropout-7"),
        # Also where the value does not always apply.
        ({"sweep": SPARSITY}, "config.out-of-range", "SWEEP magnitude-pruning-sparsity-1.5"),
        ({"seeds": "auto", "SINGLE_TRAINING": True}, "config.conflict", "SEEDS=auto"),
        ({**STUDY, "seeds": "auto", "FINALIST_MIN_SEEDS": 4}, "config.conflict", ""),
        ({**STUDY, "seeds": "auto", "VERDICT_LOOKS": "8,5,3"}, "config.out-of-range", ""),
        ({**STUDY, "seeds": "auto", "VERDICT_LOOKS": "3,five,8"}, "config.wrong-type", ""),
    ],
)
def test_a_plan_is_refused(planned, options, code, where):
    error = error_of(planned, **options)
    assert error.codes == [code] and where in error.problems[0].where


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


def test_a_changed_setting_gives_new_directories_and_a_changed_folder_none(planned):
    paths = [
        planned(**settings).runs[0].path.name for settings in ({}, {"BLOCK_SIZE": 64}, {"JOBS": 2})
    ]
    assert paths[0] != paths[1] and paths[0] == paths[2]


def test_without_a_config_the_step_comes_from_the_studys_own_defconfig(tmp_path):
    settings = parse_command_line_settings(["OPTIMIZER_ADAMW=y", "DEVICE_CPU=y"])
    (run,) = make_plan([*config_layers_to_check(tmp_path), settings], tmp_path, steps="mla").runs
    assert run.config.optimizer.name == "adamw"
    assert run.config.model.shape.n_embd == 768
    assert list(tmp_path.iterdir()) == []


def test_a_table_keeps_the_rest_of_the_study_that_has_begun(planned):
    whole = planned(**STUDY, seeds="1,9")
    for run in (whole.runs[0], whole.runs[-1]):
        run.path.mkdir(parents=True)
    part = planned(**STUDY, steps="7")
    table = [(run.variant.number, run.seed) for run in table_plan(part).runs]
    assert table == [(0, 1), (7, 1), (18, 9)]


def test_the_command_prints_every_run_and_writes_nothing(configure, capsys):
    build = configure(**STUDY)
    before = sorted(build.rglob("*"))
    assert call("plan", ["-O", str(build)]) == 0
    shown, count = capsys.readouterr().out, len(RATIO.steps)
    assert all(f"{RATIO.label(step)} s1" in shown for step in RATIO.steps)
    assert f"ratio study (paper_repro), {count} x 1 seed, {count} runs, 0 done" in shown
    assert sorted(build.rglob("*")) == before


def test_a_plan_with_other_runs_is_that_of_a_new_plan(configure):
    """The configurations of a block are resolved once, for the first seed."""
    build = configure(**STUDY, RA_MLA_ABLATION_STEPS="0,7")
    layers = config_layers(build)
    part = make_plan(layers, build, steps="7", seeds="5")
    for steps, seeds in (("all", "1-4"), ("", "2,4294967295")):
        known = with_runs(part, steps, seeds)
        new = make_plan(layers, build, steps=steps, seeds=seeds)
        assert known.runs == new.runs and known.variants == new.variants
        assert [run.config.values for run in known.runs] == [r.config.values for r in new.runs]
        assert known.looks == new.looks and known.folder == new.folder
        assert len({run.config.hash8 for run in known.runs}) == len(known.runs)
    (last,) = make_plan(layers, build, steps="7", seeds="4294967295").runs
    assert (last.config, last.path) == (known.runs[-1].config, known.runs[-1].path)
    assert error_of(with_runs, part, seeds="5,4294967296").codes == ["config.out-of-range"]


def test_selected_steps_are_planned_although_others_do_not_fit(configure):
    """At this width, the golden steps have no exact ratio."""
    narrow = {"MODEL_SIZE_TINY": None, "MODEL_SIZE_CUSTOM": True}
    build = configure(**STUDY, **narrow, N_LAYER=2, N_HEAD=2, N_EMBD=64)
    layers = config_layers(build)
    plan = make_plan(layers, build, steps="0,ra")
    assert [run.variant.slug for run in plan.runs] == ["baseline", "ra"]
    (problem,) = plan.left_out
    assert problem.code == "config.ratio-unreachable" and problem.where == "02-golden"
    # The whole study, its table, and a step that does not fit.
    assert len(table_plan(plan).runs) == 2
    for steps in ("", "0,golden"):
        error = error_of(make_plan, layers, build, steps=steps)
        assert {*error.codes} == {"config.ratio-unreachable"}


# SEEDS=auto.

AUTO = STUDY | {"RA_MLA_ABLATION_STEPS": "0-3", "VERDICT_AA": False, "VERDICT_VARIANCE_OWN": True}


def looked(plan, waiting, effect=2.5):
    """Finish the runs of the plan, and take its look; ``waiting`` is much noisier than the others."""
    for run in plan.runs:
        offset = -0.5 * (run.variant.number or 0)
        if run.variant.slug == waiting:
            offset = effect + 0.6 * (run.seed % 3 - 1)
        if not run.path.exists():
            own = {**MANIFEST, "run": {"hash8": run.config.hash8}}
            offset += 0.05 * run.seed
            write_planned(run, 3, 6, symbols=run.config.values, manifest=own, offset=offset)
    read_study(plan.study, plan.runs, plan=declared_verdicts(plan))


def trained(plan):
    """Return the slugs of each seed."""
    blocks = {}
    for run in plan.runs:
        blocks.setdefault(run.seed, []).append(run.variant.slug)
    return blocks


def test_auto_plans_the_first_look_for_every_step(planned):
    plan = planned(seeds="auto", **AUTO, SEED=7)
    assert list(trained(plan)) == [7, 8, 9] and len(plan.runs) == 12
    assert plan.auto.looks == (3, 5, 8) and plan.auto.most_later_runs == 20
    rows = view.look(plan)
    text = view.plan_text(plan, rows)
    assert "look 1 at 3 seeds; then at most 20 more runs, until 8 seeds" in text
    fields = json.loads(view.to_json(plan, rows))
    assert (fields["looks"]["seeds"], fields["schema_version"]) == ([3, 5, 8], 1)
    assert [run["label"] for run in fields["runs"]] == [run.label for run in plan.runs]


@pytest.mark.slow
@pytest.mark.parametrize("aa", [False, True])
def test_auto_plans_only_the_steps_of_open_comparisons_after_a_look(planned, aa):
    """And the baseline, and the A/A step if there is one."""
    settings = AUTO | {"VERDICT_AA": aa, "VERDICT_AGAINST_PARENT": True}
    plan = planned(seeds="auto", **settings)
    slugs = [v.slug for v in plan.variants]
    chained, parent = slugs[3], plan.variants[3].parent
    looked(plan, chained, 1.0)
    plan = planned(seeds="auto", **settings)
    assert trained(plan)[3] == slugs and ("baseline-aa" in slugs) == aa
    expected = [v for v in slugs if v in {"baseline", parent, chained, "baseline-aa"}]
    assert trained(plan)[4] == trained(plan)[5] == expected and len(trained(plan)) == 5
    assert plan.auto.number == 2 and plan.auto.most_later_runs == 3 * len(expected)
    looked(plan, chained, 1.0)
    plan = planned(seeds="auto", **settings)
    assert plan.auto.looks == () and len(trained(plan)) == 5 and trained(plan)[5] == expected
    assert "no look left after 5 seeds" in view.plan_text(plan, view.look(plan))


@pytest.mark.slow
def test_auto_goes_on_after_a_fixed_list_with_the_reserve(planned):
    plan = planned(seeds="1-5", **AUTO)
    assert plan.looks == LookPlan((5,), (0.9,))
    looked(plan, plan.variants[1].slug, 0.0)
    plan = planned(seeds="auto", **AUTO)
    assert plan.auto.looks == (8,) and trained(plan)[8] == [v.slug for v in plan.variants[:2]]


def test_auto_plans_matrices_and_sweeps(planned):
    matrix = {"TEST_MATRIX_MODE": True, "TEST_MATRIX_AXES": "LEARNING_RATE=1e-3,1e-4"}
    assert len(planned(seeds="auto", **matrix).runs) == 6
    assert len(planned(seeds="auto", sweep="LEARNING_RATE=1e-3,1e-4,2e-4").runs) == 9


def test_the_whole_study_is_judged_whatever_steps_are_selected(planned):
    plan = planned(steps="0,1", seeds="1-3", **AUTO)
    assert len(plan.runs) == 6 and len(plan.variants) == 4
