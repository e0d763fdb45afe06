"""Renaming of old run directories."""

from lib.runner.queue import set_aside
from lib.runs.run_dir import RunDir


def test_results_moved_aside_in_the_same_second_are_all_kept(tmp_path):
    moved = set()
    for content in "abc":
        run = RunDir(tmp_path / "run")
        run.path.mkdir()
        run.logs.write_text(content)
        moved.add(set_aside(run))
    assert len(moved) == 3
    assert sorted(RunDir(path).logs.read_text() for path in moved) == ["a", "b", "c"]
