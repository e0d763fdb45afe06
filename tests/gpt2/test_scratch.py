"""Data and settings of standalone runs, which repeat a recorded run."""

import pytest

from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from gpt2.records.files import write_resolved_config
from gpt2.running.reproduce import scratch_plan, train_scratch, unobserved, with_data
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.build_folder import write_texts
from tests.integration.conftest import SMALL


@pytest.fixture
def made(tmp_path):
    """Return a configuration with the relative text path "text", its build folder and data set."""
    build = tmp_path / "build"
    write_texts(build)
    config = resolve_config(KconfigTree(), [ConfigLayer.of("test", "test", SMALL)])
    return config, build, prepare_dataset(config.data, build)


def test_a_data_folder_is_taken_as_it_is(made, tmp_path):
    config, build, folder = made
    found = with_data(config, str(folder.parent), tmp_path / "elsewhere")
    assert found.hash8 == config.hash8 and prepare_dataset(found.data, build) == folder


def test_data_that_is_not_there_is_the_users_error(made, tmp_path):
    config, build, _ = made
    for data, expected in (("nowhere", "no such folder"), ("build/text", f"{build}/text")):
        with pytest.raises(ConfigError) as caught:
            with_data(config, str(tmp_path / data), build)
        assert caught.value.codes == ["data.missing"] and expected in str(caught.value)


def test_trackers_and_time_limit_are_left_out_and_the_run_stays_the_same(made):
    config, _, _ = made
    values = {**config.values, "RUN_TIME_LIMIT_SECONDS": 60, "TRACKER_WANDB": True}
    quiet = Config.from_values(unobserved(values))
    assert quiet.hash8 == config.hash8
    assert quiet.tracking.trackers == () and quiet.run_time_limit_seconds == 0


@pytest.mark.parametrize(
    ("state", "other", "anew", "kept"),
    [
        ("RUNNING", {}, False, True),
        ("INTERRUPTED", {}, False, True),
        ("RUNNING", {}, True, False),
        ("SUCCESS", {}, False, False),
        ("RUNNING", {"MAX_ITERS": 5}, False, False),
    ],
)
def test_what_was_begun_is_continued_and_nothing_is_lost(
    made, tmp_path, monkeypatch, state, other, anew, kept
):
    config, build, _ = made
    plan = scratch_plan(config, ["one"], tmp_path / "scratch", build)
    run = RunDir(plan.runs[0].path)
    run.path.mkdir(parents=True)
    write_resolved_config(
        run, resolve_config(KconfigTree(), [ConfigLayer.of("test", "test", {**SMALL, **other})])
    )
    write_status(run, RunStatus(State(state)))
    monkeypatch.setattr("gpt2.running.launch.run_all", lambda *given: 0)
    assert train_scratch(plan, anew=anew) == 0
    assert run.path.exists() == kept
    assert len(list((tmp_path / "scratch").glob("one*"))) == 1
