"""Removal of runs: which are removed, and what stays."""

import pytest

from gpt2.records.listing import list_runs, remove_runs, select
from lib.runs.lease import DEFAULT_SECONDS, take_lease
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.lib.fabricated import write_run


@pytest.fixture
def results(tmp_path):
    """Return a folder with two finished runs, a failed, a running and a replaced one."""
    folder = tmp_path / "results"
    for name in ("base-s1-aaaaaaaa", "ra-s1-bbbbbbbb", "base-s1-aaaaaaaa.old-20260101-000000"):
        run = write_run(folder / "ratio" / name)
        (run.checkpoints / "10").mkdir(parents=True)
    for name, state in (("ra-s2-cccccccc", State.FAILED), ("ra-s3-dddddddd", State.RUNNING)):
        run = RunDir(folder / "ratio" / name)
        run.path.mkdir()
        write_status(run, RunStatus(state))
    (folder / "ratio" / "table.md").write_text("table")
    return folder


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("state=failed", ["ra-s2-cccccccc"]),
        ("state=replaced", ["base-s1-aaaaaaaa.old-20260101-000000"]),
        ("step=ra", ["ra-s1-bbbbbbbb", "ra-s2-cccccccc", "ra-s3-dddddddd"]),
    ],
)
def test_selected_runs_are_removed_and_no_others(results, where, names):
    before = {path.name for path in (results / "ratio").iterdir()}
    listed = select(list_runs(results), where)
    assert remove_runs(listed, results) == []
    assert before - {path.name for path in (results / "ratio").iterdir()} == set(names)


def test_a_locked_run_and_a_link_stay(results, tmp_path):
    outside = write_run(tmp_path / "elsewhere" / "x-s1-eeeeeeee").path
    (results / "ratio" / "x-s1-eeeeeeee").symlink_to(outside)
    held = results / "ratio" / "ra-s1-bbbbbbbb"
    with take_lease(RunDir(held), DEFAULT_SECONDS):
        reasons = remove_runs(list_runs(results), results)
    assert [reason.partition(":")[0] for reason in reasons] == [
        "ratio/ra-s1-bbbbbbbb",
        "ratio/x-s1-eeeeeeee",
    ]
    assert held.is_dir() and outside.is_dir() and len(list_runs(results)) == 2


def test_an_interrupted_removal_leaves_no_run(results, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    listed = select(list_runs(results), "state=failed")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", interrupt)
        remove_runs(listed, results)
    assert [run["state"] for run in list_runs(results)].count("failed") == 0
    remove_runs([], results)
    assert not list(results.glob("*/.removed-*"))
