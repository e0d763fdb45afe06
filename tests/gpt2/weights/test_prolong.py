"""``make prolong``: a new run from the weights of a finished one."""

import pytest

from gpt2.running.prolong import SEED_STEP, plan_prolonged
from lib.config.layers import ConfigLayer
from lib.errors import ConfigError
from lib.runs.run_dir import RunStatus, State, write_status
from tests.gpt2.weights.conftest import write_finished


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
    assert planned.path.parent == tmp_path / "results" / "prolonged"
    assert planned.path.name.startswith(f"ra-s{3 + SEED_STEP}-")
    assert "10 it done; 40 more" in capsys.readouterr().err


def test_settings_on_top(run, tmp_path):
    top = [ConfigLayer.of("command line", "SET", {"LEARNING_RATE": "2e-3", "SEED": 5})]
    plan = plan_prolonged(str(run.path), tmp_path, 40, top)
    assert plan.base.schedule.learning_rate == 2e-3 and plan.runs[0].seed == 5
    top = [ConfigLayer.of("command line", "SET", {"SLIDING_WINDOW": 5})]
    with pytest.raises(ConfigError) as caught:
        plan_prolonged(str(run.path), tmp_path, 40, top)
    assert caught.value.codes == ["config.unmet-dependency"]


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
    assert plan.folder == tmp_path / "build" / "results" / "prolonged"
    assert plan.base.data.data_dir == configure().data.data_dir


def test_a_run_elsewhere_is_named_by_its_path(configure, tmp_path):
    run = write_finished(configure(), tmp_path / "theirs")
    plan = plan_prolonged(str(run.path), tmp_path, 40, [])
    assert plan.base.init.init_from == f"run:{run.path}"


def test_refusals(run, tmp_path):
    with pytest.raises(ConfigError) as caught:
        plan_prolonged(str(run.path), tmp_path, 0, [])
    assert caught.value.codes == ["config.out-of-range"]
    write_status(run, RunStatus(State.INTERRUPTED))
    with pytest.raises(ConfigError) as caught:
        plan_prolonged(str(run.path), tmp_path, 40, [])
    assert caught.value.codes == ["run.not-finished"]
