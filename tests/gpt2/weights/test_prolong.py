"""``make prolong``: a new run from the weights of a finished one."""

import json

import pytest

from gpt2.records.files import write_resolved_config
from gpt2.running.prolong import SEED_STEP, plan_prolonged, with_other_forks
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.report.contrasts import contrasts_of
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.gpt2.weights.conftest import write_finished
from tests.lib.fabricated import reseal


@pytest.fixture(autouse=True)
def texts_are_the_recorded_ones(monkeypatch):
    monkeypatch.setattr("gpt2.running.prolong.require_recorded_inputs", lambda *given: None)


@pytest.fixture
def run(configure, tmp_path):
    """Return a finished run of a study."""
    (tmp_path / "results" / "ratio").mkdir(parents=True)
    settings = {
        "SINGLE_TRAINING": None,
        "RA_MLA_ABLATION_MODE": True,
        "RECIPROCAL": True,
        "SEED": 3,
        "INIT_STREAM": 2,
    }
    return write_finished(configure(**settings), tmp_path / "results" / "ratio" / "ra-s3-1a2b3c4d")


def test_the_settings_of_the_run_remain_except_for_budget_start_and_seed(run, tmp_path, capsys):
    plan = plan_prolonged(str(run.path), tmp_path, 40, [])
    (planned,) = plan.runs
    values = planned.config.values
    assert (values["RECIPROCAL"], values["MAX_ITERS"], values["INIT_STREAM"]) == (True, 40, 0)
    assert values["INIT_FROM"] == "run:ra-s3-1a2b3c4d"
    assert planned.seed == 3 + SEED_STEP
    assert planned.path.parent == tmp_path / "results" / "prolonged-ra-s3-1a2b3c4d-10-40"
    assert planned.path.name.startswith(f"unchanged-s{3 + SEED_STEP}-")
    assert "10 it done; 40 more" in capsys.readouterr().err


def test_settings_on_top(run, tmp_path):
    top = [ConfigLayer.of("command line", "SET", {"LEARNING_RATE": "2e-3", "SEED": 5})]
    plan = plan_prolonged(str(run.path), tmp_path, 40, top)
    assert plan.base.schedule.learning_rate == 2e-3 and plan.runs[0].seed == 5
    top = [ConfigLayer.of("command line", "SET", {"SLIDING_WINDOW": 5})]
    with pytest.raises(ConfigError) as caught:
        plan_prolonged(str(run.path), tmp_path, 40, top)
    assert caught.value.codes == ["config.unmet-dependency"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "unchanged"),
        ({"RECIPROCAL_ALPHA": "0.2"}, "reciprocal-alpha-0.2"),
        # In one order, whatever the order in SET.
        ({"LEARNING_RATE": "2e-3", "BIAS": False}, "no-bias-learning-rate-2e-3"),
        ({"OPTIMIZER_SGD": True}, "optimizer-sgd"),
        # Neither the seed, nor what changes no bit, nor what the run had before is a change.
        ({"SEED": 5, "LOG_INTERVAL": 3, "RECIPROCAL": True}, "unchanged"),
    ],
)
def test_forks_are_named_after_what_they_change(run, tmp_path, settings, name):
    top = [ConfigLayer.of("command line", "SET", settings)]
    plan = plan_prolonged(str(run.path), tmp_path, 40, top)
    assert [planned.variant.slug for planned in plan.runs] == [name]


def test_continuations_differ_in_their_seeds(run, tmp_path):
    plan = plan_prolonged(str(run.path), tmp_path, 40, [], count=3)
    assert [planned.seed for planned in plan.runs] == [1003, 2003, 3003]
    assert {planned.config.seed for planned in plan.runs} == {1003, 2003, 3003}
    near = [ConfigLayer.of("command line", "SET", {"SEED": 4294967295})]
    with pytest.raises(ConfigError) as caught:
        plan_prolonged(str(run.path), tmp_path, 40, near, count=2)
    assert caught.value.codes == ["config.out-of-range"]


def test_all_forks_of_one_run_are_compared_with_the_unchanged_one(run, tmp_path):
    top = [ConfigLayer.of("command line", "SET", {"RECIPROCAL_ALPHA": "0.2"})]
    changed = plan_prolonged(str(run.path), tmp_path, 40, top)
    assert [r.variant.parent for r in with_other_forks(changed).runs] == [""]
    for planned in changed.runs:
        planned.path.mkdir(parents=True)
        write_resolved_config(RunDir(planned.path), planned.config)
    # Longer forks, forks of another run, damaged folders and others are left out.
    longer = plan_prolonged(str(run.path), tmp_path, 50, top)
    assert longer.folder != changed.folder
    for name in ("reciprocal-alpha-0.2-s9-00000000", "figures", "a-s1-1.old-2"):
        (changed.folder / name).mkdir()
    (changed.folder / "reciprocal-alpha-0.2-s9-00000000" / "resolved_config.yaml").touch()
    whole = with_other_forks(plan_prolonged(str(run.path), tmp_path, 40, [], count=2))
    assert [(r.variant.slug, r.variant.parent, r.seed) for r in whole.runs] == [
        ("unchanged", "", 1003),
        ("unchanged", "", 2003),
        ("reciprocal-alpha-0.2", "unchanged", 1003),
    ]
    assert whole.runs[2].path == changed.runs[0].path
    assert [c.name for c in contrasts_of(whole.variants, "both")] == [
        "reciprocal-alpha-0.2 vs unchanged"
    ]
    assert "one run" in whole.note


def test_commands_and_accounts_of_the_run_are_not_taken_over(configure, tmp_path):
    commands = {
        "ON_DONE_CMD": "rm x",
        "SLURM_SETUP": "rm x",
        "SLURM_OPTIONS": "--export=BASH_ENV=x",
    }
    account = {"TRACKER_WANDB": True, "TRACKER_WANDB_ENTITY": "theirs", "TRACKER_PROJECT": "theirs"}
    theirs = write_finished(configure(**commands, **account), tmp_path / "theirs")
    plan = plan_prolonged(str(theirs.path), tmp_path, 40, [])
    slurm = plan.base.slurm
    assert (plan.base.study.on_done_command, slurm.setup, slurm.options) == ("", "", "")
    assert (plan.base.tracking.trackers, plan.base.tracking.project) == ((), "")
    top = [ConfigLayer.of("command line", "SET", {"ON_DONE_CMD": "true"})]
    plan = plan_prolonged(str(theirs.path), tmp_path, 40, top)
    assert plan.base.study.on_done_command == "true"


def test_a_run_does_not_choose_where_files_are_written(configure, tmp_path):
    theirs = configure(OUTPUT_DIR=str(tmp_path / "out"), DATA_DIR=str(tmp_path / "data-of-theirs"))
    run = write_finished(theirs, tmp_path / "theirs")
    plan = plan_prolonged(str(run.path), tmp_path / "build", 40, [])
    assert plan.folder == tmp_path / "build" / "results" / "prolonged-theirs-10-40"
    # A run elsewhere is named by its path.
    assert plan.base.init.init_from == f"run:{run.path}"
    assert plan.base.data.data_dir == configure().data.data_dir


def test_refusals(run, tmp_path):
    with pytest.raises(ConfigError) as caught:
        plan_prolonged(str(run.path), tmp_path, 0, [])
    assert caught.value.codes == ["config.out-of-range"]
    write_status(run, RunStatus(State.INTERRUPTED))
    with pytest.raises(ConfigError) as caught:
        plan_prolonged(str(run.path), tmp_path, 40, [])
    assert caught.value.codes == ["run.not-finished"]
    record = json.loads(run.resolved_config.read_text())
    record["symbols"]["SEED"] = "three"
    run.resolved_config.write_text(json.dumps(record))
    write_status(run, RunStatus(State.SUCCESS))
    reseal(run)
    with pytest.raises(ConfigError) as caught:
        plan_prolonged(str(run.path), tmp_path, 40, [])
    (problem,) = caught.value.problems
    assert problem.where == str(run.resolved_config) and "three" in problem.what
