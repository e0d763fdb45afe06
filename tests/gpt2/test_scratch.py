"""Data and settings of standalone runs, which repeat a recorded run."""

import shutil

import pytest

from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from gpt2.records.run_files import write_resolved_config
from gpt2.running.launch import scratch_plan, train_scratch
from gpt2.running.reproduce import unobserved, with_data
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.integration.conftest import SMALL


@pytest.fixture
def made(tmp_path):
    """Return a configuration with the relative text path "text", its build folder and data set."""
    build = tmp_path / "build"
    (build / "text").mkdir(parents=True)
    for i in range(12):
        (build / f"text/{i}.txt").write_text(f"{i} makes {i * i}, as anybody knows. " * 9)
    config = resolve_config(KconfigTree(), [ConfigLayer.of("test", "test", SMALL)])
    return config, build, prepare_dataset(config.data, build)


def test_a_data_folder_is_taken_as_it_is(made, tmp_path):
    config, build, folder = made
    found, place = with_data(config, str(folder.parent), tmp_path / "scratch", build)
    assert (found.hash8, place) == (config.hash8, build)
    assert prepare_dataset(found.data, place) == folder and not (tmp_path / "scratch").exists()


def test_the_text_of_a_custom_data_set_gives_the_same_data(made, tmp_path):
    config, build, folder = made
    elsewhere = shutil.move(build / "text", tmp_path / "elsewhere")
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    found, place = with_data(config, str(elsewhere), fresh / "reproduced", fresh)
    assert found.hash8 == config.hash8 and found.data.custom_path == "text"
    again = prepare_dataset(found.data, place)
    assert (again.parent, again.name) == (fresh / "data", folder.name)
    assert (again / "dataset.json").read_bytes() == (folder / "dataset.json").read_bytes()


def test_data_that_is_not_there_is_the_users_error(made, tmp_path):
    config, build, folder = made
    fresh = tmp_path / "fresh"
    with pytest.raises(ConfigError) as caught:
        with_data(config, str(folder.parent), fresh / "reproduced", fresh)
    assert caught.value.codes == ["data.missing"] and "DATA=THE_TEXT" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        with_data(config, str(tmp_path / "nowhere"), tmp_path / "scratch", build)
    assert caught.value.codes == ["data.missing"] and "nowhere" in str(caught.value)
    absolute = Config.from_values({**config.values, "CUSTOM_PATH": "/nowhere/text"})
    with pytest.raises(ConfigError) as caught:
        with_data(absolute, str(build / "text"), tmp_path / "scratch", build)
    assert caught.value.codes == ["data.absolute-path"] and "/nowhere/text" in str(caught.value)


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
