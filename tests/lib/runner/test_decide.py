"""What a run directory requires: decided by its content, before anything is written."""

import json
from types import SimpleNamespace

import pytest

from lib.errors import ConfigError
from lib.runner.queue import (
    RunAction,
    decide,
    require_matching_directories,
    set_aside,
)
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunDir, RunStatus, State, write_status


@pytest.fixture
def run(tmp_path) -> Run:
    config = SimpleNamespace(identity=lambda: {"name": "b"}, hash8="b")
    (tmp_path / "b").mkdir()
    return Run("fake", RunVariant("b", number=1), 1, config, tmp_path / "b")


@pytest.mark.parametrize(
    ("state", "changes", "stale", "action"),
    [
        (None, ["m.py"], "stop", RunAction.TRAIN),
        (State.RUNNING, [], "stop", RunAction.TRAIN),
        (State.FAILED, [], "stop", RunAction.TRAIN),
        (State.SUCCESS, [], "stop", RunAction.DONE),
        (State.SUCCESS, ["m.py"], "keep", RunAction.DONE),
        (State.INTERRUPTED, ["m.py"], "keep", RunAction.TRAIN),
        (State.INTERRUPTED, ["m.py"], "stop", RunAction.STALE),
        (State.SUCCESS, ["m.py"], "rerun", RunAction.RESTART),
        # No result is lost.
        (State.FAILED, ["m.py"], "stop", RunAction.RESTART),
        (State.INVALID, ["m.py"], "keep", RunAction.RESTART),
    ],
)
def test_the_action_for_a_run(run, state, changes, stale, action):
    if state:
        write_status(RunDir(run.path), RunStatus(state))
    assert decide(run, lambda record: changes, stale).action is action


def test_a_directory_that_holds_another_run_is_refused(run):
    """A damaged one: tests/gpt2/records/test_damaged_results.py."""
    config = RunDir(run.path).resolved_config
    config.write_text(json.dumps({"identity": {"name": "b"}}))
    write_status(RunDir(run.path), RunStatus(State.RUNNING))
    require_matching_directories([run])
    config.write_text(json.dumps({"identity": {"name": "z"}}))
    with pytest.raises(ConfigError) as caught:
        require_matching_directories([run])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("run.foreign-directory", str(run.path))
    assert "fake/01-b s1" in problem.what and "OUTPUT_DIR" in problem.next


def test_results_moved_aside_in_the_same_second_are_all_kept(tmp_path):
    moved = set()
    for content in "abc":
        run = RunDir(tmp_path / "run")
        run.path.mkdir()
        run.logs.write_text(content)
        moved.add(set_aside(run))
    assert sorted(RunDir(path).logs.read_text() for path in moved) == ["a", "b", "c"]
