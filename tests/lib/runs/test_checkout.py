"""Reconstruction of a source tree from a commit and a diff."""

import subprocess

import pytest

from lib.errors import PreflightError
from lib.files import sha256_file
from lib.runs.code import checkout_commit, has_commit, mismatched_files


def git(folder, *args):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Create two commits of one file, then edit it; return the folder and the first commit."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr("lib.runs.code.ROOT", root)
    git(root, "init", "-q")
    for text in ("one\n", "two\n"):
        (root / "a.py").write_text(text)
        git(root, "add", "a.py")
        git(root, "commit", "-q", "-m", text)
    (root / "a.py").write_text("three\n")
    return root, git(root, "rev-parse", "HEAD~1").strip()


def test_a_commit_and_the_edits_on_top(repository, tmp_path):
    root, first = repository
    checkout_commit(first, None, tmp_path / "old")
    assert (tmp_path / "old" / "a.py").read_text() == "one\n"
    diff = tmp_path / "code.diff"
    diff.write_text(git(root, "diff", "--binary", "HEAD"))
    checkout_commit(git(root, "rev-parse", "HEAD").strip(), diff, tmp_path / "edited")
    assert (tmp_path / "edited" / "a.py").read_text() == "three\n"
    # The repository is as it was, edits included.
    assert git(root, "status", "--short") == " M a.py\n"
    assert git(root, "worktree", "list").count("\n") == 1


def test_a_failed_checkout_reports_gits_message(repository, tmp_path):
    root, first = repository
    assert has_commit(first) and not has_commit("0" * 40) and not has_commit("None")
    diff = tmp_path / "code.diff"
    diff.write_text(git(root, "diff", "--binary", "HEAD"))
    with pytest.raises(PreflightError) as caught:
        checkout_commit(first, diff, tmp_path / "wrong")
    assert caught.value.codes == ["git.failed"]
    # The second part is git's own message.
    assert "git apply" in str(caught.value) and "error: patch failed: a.py" in str(caught.value)
    with pytest.raises(PreflightError) as caught:
        checkout_commit("0" * 40, None, tmp_path / "absent")
    assert caught.value.codes == ["git.failed"] and "git checkout" in str(caught.value)


def test_files_that_are_not_as_they_were_recorded(tmp_path):
    for name in ("same.py", "edited.py"):
        (tmp_path / name).write_text("x = 1\n")
    digest = sha256_file(tmp_path / "same.py")
    (tmp_path / "edited.py").write_text("x = 2\n")
    recorded = dict.fromkeys(("same.py", "edited.py", "gone.py", "/weights/of/others"), digest)
    assert mismatched_files(tmp_path, recorded) == ["edited.py", "gone.py"]
