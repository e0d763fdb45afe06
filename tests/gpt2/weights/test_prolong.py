"""``make prolong``: a new run from the weights of a finished one."""

import json
import shutil

import pytest

from gpt2.records.files import write_resolved_config
from gpt2.running.prolong import SEED_STEP, plan_prolonged, with_other_forks
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.report.contrasts import contrasts_of
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.gpt2.weights.conftest import write_finished
from tests.lib.fabricated import reseal

NAME = "ra-s3-1a2b3c4d"


@pytest.fixture(autouse=True)
def texts_are_the_recorded_ones(monkeypatch):
    monkeypatch.setattr("gpt2.running.prolong.require_recorded_inputs", lambda *given: None)


@pytest.fixture
def run(configure, tmp_path):
    """Return a finished run of a study."""
    (tmp_path / "results" / "ratio").mkdir(parents=True)
    study = {"SINGLE_TRAINING": None, "RA_MLA_ABLATION_MODE": True}
    config = configure(**study, RECIPROCAL=True, SEED=3, INIT_STREAM=2)
    return write_finished(config, tmp_path / "results" / "ratio" / NAME)


@pytest.fixture
def prolonged(run, tmp_path):
    """Return a function that plans to continue the run, with settings on top."""

    def plan(iterations=40, count=1, **settings):
        top = [ConfigLayer.of("command line", "SET", settings)]
        return plan_prolonged(str(run.path), tmp_path, iterations, top, count=count)

    return plan


def test_the_settings_of_the_run_remain_except_for_budget_start_and_seed(
    prolonged, tmp_path, capsys
):
    (planned,) = prolonged().runs
    values = planned.config.values
    assert (values["RECIPROCAL"], values["MAX_ITERS"], values["INIT_STREAM"]) == (True, 40, 0)
    assert values["INIT_FROM"] == f"run:{NAME}"
    assert planned.seed == 3 + SEED_STEP
    assert planned.path.parent == tmp_path / "results" / f"prolonged-{NAME}-10-40"
    assert planned.path.name.startswith(f"unchanged-s{3 + SEED_STEP}-")
    assert "10 it done; 40 more" in capsys.readouterr().err
    plan = prolonged(LEARNING_RATE="2e-3", SEED=5)
    assert plan.base.schedule.learning_rate == 2e-3 and plan.runs[0].seed == 5


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
def test_forks_are_named_after_what_they_change(prolonged, settings, name):
    assert [planned.variant.slug for planned in prolonged(**settings).runs] == [name]


def test_continuations_differ_in_their_seeds(prolonged):
    runs = prolonged(count=3).runs
    assert [planned.seed for planned in runs] == [1003, 2003, 3003]
    assert {planned.config.seed for planned in runs} == {1003, 2003, 3003}


def test_all_forks_of_one_run_are_compared_with_the_unchanged_one(prolonged):
    changed = prolonged(RECIPROCAL_ALPHA="0.2")
    assert [r.variant.parent for r in with_other_forks(changed).runs] == [""]
    (planned,) = changed.runs
    planned.path.mkdir(parents=True)
    write_resolved_config(RunDir(planned.path), planned.config)
    shutil.copytree(planned.path, RunDir(planned.path).replaced("20260101-000000"))
    # Longer forks, forks of another run, replaced runs, damaged folders and others are left out.
    assert prolonged(50, RECIPROCAL_ALPHA="0.2").folder != changed.folder
    for name in ("reciprocal-alpha-0.2-s9-00000000", "figures", "a-s1-1.old-2"):
        (changed.folder / name).mkdir()
    (changed.folder / "reciprocal-alpha-0.2-s9-00000000" / "resolved_config.yaml").touch()
    whole = with_other_forks(prolonged(count=2))
    assert [(r.variant.slug, r.variant.parent, r.seed) for r in whole.runs] == [
        ("unchanged", "", 1003),
        ("unchanged", "", 2003),
        ("reciprocal-alpha-0.2", "unchanged", 1003),
    ]
    assert whole.runs[2].path == planned.path
    (contrast,) = contrasts_of(whole.variants, "both")
    assert contrast.name == "reciprocal-alpha-0.2 vs unchanged" and "one run" in whole.note


def test_a_run_chooses_neither_commands_nor_accounts_nor_places(configure, tmp_path):
    commands = {
        "ON_DONE_CMD": "rm x",
        "SLURM_SETUP": "rm x",
        "SLURM_OPTIONS": "--export=BASH_ENV=x",
    }
    account = {"TRACKER_WANDB": True, "TRACKER_WANDB_ENTITY": "theirs", "TRACKER_PROJECT": "theirs"}
    places = {"OUTPUT_DIR": str(tmp_path / "out"), "DATA_DIR": str(tmp_path / "data-of-theirs")}
    theirs = write_finished(configure(**commands, **account, **places), tmp_path / "theirs")
    top = [ConfigLayer.of("command line", "SET", {"ON_DONE_CMD": "true"})]
    for settings, command in (([], ""), (top, "true")):
        plan = plan_prolonged(str(theirs.path), tmp_path / "build", 40, settings)
        slurm, tracking = plan.base.slurm, plan.base.tracking
        assert plan.base.study.on_done_command == command
        assert (slurm.setup, slurm.options) == (tracking.project, tracking.project) == ("", "")
        assert tracking.trackers == ()
    assert plan.folder == tmp_path / "build" / "results" / "prolonged-theirs-10-40"
    # A run elsewhere is named by its path.
    assert plan.base.init.init_from == f"run:{theirs.path}"
    assert plan.base.data.data_dir == configure().data.data_dir


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"iterations": 0}, "config.out-of-range"),
        ({"count": 2, "SEED": 4294967295}, "config.out-of-range"),
        ({"SLIDING_WINDOW": 5}, "config.unmet-dependency"),
    ],
)
def test_invalid_settings_are_refused(prolonged, arguments, code):
    with pytest.raises(ConfigError) as caught:
        prolonged(**arguments)
    assert caught.value.codes == [code]


def test_unfinished_and_damaged_runs_are_refused(run, prolonged):
    write_status(run, RunStatus(State.INTERRUPTED))
    with pytest.raises(ConfigError) as caught:
        prolonged()
    assert caught.value.codes == ["run.not-finished"]
    record = json.loads(run.resolved_config.read_text())
    record["symbols"]["SEED"] = "three"
    run.resolved_config.write_text(json.dumps(record))
    write_status(run, RunStatus(State.SUCCESS))
    reseal(run)
    with pytest.raises(ConfigError) as caught:
        prolonged()
    (problem,) = caught.value.problems
    assert problem.where == str(run.resolved_config) and "three" in problem.what
