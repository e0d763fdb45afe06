"""Code of a run: digests of what is loaded, what is uncommitted, and the patch that restores it."""

import os
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

from lib.errors import RunError
from lib.files import sha256_file
from lib.project import ROOT
from lib.runs import code as runs_code
from lib.runs.code import (
    describe_tree,
    git_state,
    head_commit,
    uncommitted_problems,
    write_code_patch,
)


@pytest.fixture
def git(tmp_path, monkeypatch):
    """A repository with two packages and a committed state, taken for this tree."""
    root = tmp_path / "tree"
    for name in ("gpt2/model.py", "gpt2/old.py", "lib/a.py", "docs/page.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n")
    (root / "lib" / "table.bin").write_bytes(bytes(range(256)))
    (root / ".gitignore").write_text("results\nscratch.py\n")
    monkeypatch.setattr(runs_code, "ROOT", root)

    def run(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=root, check=True, capture_output=True).stdout.decode()

    run("init", "-q", "-b", "trunk")
    run("add", "-A")
    run("commit", "-qm", "all")
    return run


@pytest.fixture
def root(git):
    return runs_code.ROOT


@pytest.fixture
def edited(root, git):
    """One edit of every kind."""
    (root / "gpt2" / "model.py").write_text("edited, é\n")
    (root / "gpt2" / "old.py").unlink()
    (root / "lib" / "table.bin").write_bytes(bytes(reversed(range(256))))
    (root / "lib" / "staged.py").write_text("staged\n")
    git("add", "lib/staged.py")
    # The first name would be quoted, and the second is ignored; Python imports both.
    (root / "lib" / "nové.py").write_text("new\n")
    (root / "gpt2" / "scratch.py").write_text("ignored\n")
    (root / "lib" / "empty.py").write_text("")
    (root / "gpt2" / "Kconfig.mine").write_text("config MINE\n")
    (root / "gpt2" / "notes.txt").write_text("no code\n")
    return root


def test_a_committed_tree_leaves_no_patch(root, git, tmp_path, monkeypatch):
    (tmp_path / "code.diff").write_text("of an earlier start\n")
    for name in ("results/table.md", "texts/tool.py"):
        (root / name).parent.mkdir()
        (root / name).write_text("# Nothing imports it.\n")
    (root / "gpt2" / "model.py").touch()
    sha = git("rev-parse", "HEAD").strip()
    # The caller's repository is not asked; git sets these variables for hooks.
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", other], check=True)
    with monkeypatch.context() as patched:
        patched.chdir(other)
        patched.setenv("GIT_DIR", str(other / ".git"))
        patched.setenv("GIT_WORK_TREE", str(other))
        assert git_state() == {"git_sha": sha, "branch": "trunk", "dirty_tree": False}
    assert describe_tree() == "" and uncommitted_problems("paper_repro", allowed=False) == []
    assert write_code_patch(tmp_path) is None and not (tmp_path / "code.diff").exists()


def code(root):
    """Every file that is code or known to git."""
    found = [p for p in root.rglob("*") if p.is_file() and ".git" not in p.parts]
    return {str(p.relative_to(root)): p.read_bytes() for p in found if p.suffix != ".txt"}


def test_the_patch_makes_the_same_code_from_the_commit(edited, git, tmp_path):
    assert git_state()["dirty_tree"] is True
    new = ["gpt2/Kconfig.mine", "gpt2/scratch.py", "lib/empty.py", "lib/nové.py"]
    tracked = ["gpt2/model.py", "gpt2/old.py", "lib/staged.py", "lib/table.bin"]
    assert head_commit().untracked == new and head_commit().uncommitted == [*tracked, *new]
    record = write_code_patch(tmp_path)
    assert record == {"file": "code.diff", "sha256": sha256_file(tmp_path / "code.diff")}
    # A clone without the objects of the index.
    again = tmp_path / "again"
    git("clone", "-q", "--no-local", str(edited), str(again))
    assert code(again) != code(edited)
    git("-C", str(again), "apply", str(tmp_path / "code.diff"))
    assert code(again) == code(edited)
    # Settings of the user change nothing.
    for name, value in {
        **dict.fromkeys(("diff.noprefix", "diff.mnemonicPrefix"), "true"),
        "color.diff": "always",
        "diff.external": "false",
    }.items():
        git("config", name, value)
        assert write_code_patch(tmp_path) == record, name
        git("config", "--unset", name)
    # An object that git requires for the difference.
    blob = git("rev-parse", "HEAD:gpt2/old.py").strip()
    (edited / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(RunError) as caught:
        write_code_patch(tmp_path)
    assert caught.value.codes == ["git.failed"] and blob in caught.value.problems[0].what


def test_one_line_says_what_is_not_committed_and_what_to_type(edited):
    (problem,) = uncommitted_problems("paper_repro", allowed=False)
    assert problem.code == "code.uncommitted" and "make ALLOW_DIRTY=y" in problem.next
    assert "gpt2/model.py, gpt2/old.py, lib/staged.py and 5 more" in problem.what
    assert uncommitted_problems("paper_repro", allowed=True) == []
    assert uncommitted_problems("maxout_speed", allowed=False) == []


def test_what_git_cannot_tell_is_not_clean(root, git, tmp_path, monkeypatch):
    unknown = {"git_sha": None, "branch": None, "dirty_tree": "unknown"}
    empty = tmp_path / "empty"
    subprocess.run(["git", "init", "-q", empty], check=True)
    # A folder inside another repository has no commit.
    for place, why in (
        (root / "lib", "fatal: not a git repository"),
        (empty, "does not have any commits yet"),
    ):
        monkeypatch.setattr(runs_code, "ROOT", place)
        (problem,) = uncommitted_problems("paper_repro", allowed=False)
        assert git_state() == unknown and why in describe_tree()
        assert problem.code == "code.uncommitted" and "ALLOW_DIRTY=y" in problem.next
        assert "commit it" not in str(problem) and "difference" not in str(problem)
        assert write_code_patch(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = uncommitted_problems("paper_repro", allowed=False)
    assert problem.code == "code.no-git" and git_state() == unknown


@pytest.mark.skipif(os.geteuid() != 0, reason="requires the right to give files away")
def test_the_refusal_of_another_user_s_tree_is_shown_as_git_gives_it(root, git, monkeypatch):
    monkeypatch.setenv("HOME", str(root.parent))
    monkeypatch.delenv("SUDO_UID", raising=False)
    for path in (root, root / ".git"):
        os.chown(path, 1234, 1234)
    (problem,) = uncommitted_problems("paper_repro", allowed=False)
    assert "detected dubious ownership" in problem.what and "\n" not in problem.what
    assert problem.what.endswith(f"git config --global --add safe.directory {root}")


def test_loaded_modules_are_digested_unless_they_only_run_or_read():
    """A move of a file, or an import that goes, would leave a name behind that excludes nothing."""
    for name in ("gpt2.running.launch", "gpt2.training.loop", "lib.kablate"):
        import_module(name)
    recorded = runs_code.loaded_source()
    assert recorded["lib/files.py"] == sha256_file(ROOT / "lib/files.py")
    assert all(name.startswith(("gpt2/", "lib/")) for name in recorded)
    assert "gpt2/study/step.py" not in recorded
    # An older record may have such files.
    assert runs_code.changed_since(recorded | {"gpt2/study/step.py": "0" * 64}) == []
    files = [vars(module).get("__file__") or "" for module in list(sys.modules.values())]
    loaded = [file.removeprefix(f"{ROOT}/") for file in files]
    excluded = [name for name in loaded if not runs_code.makes_results(name)]
    assert [n for n in runs_code.NOT_TRAINING if not any(e.startswith(n) for e in excluded)] == []


def test_edited_and_missing_files_are_named(tmp_path, monkeypatch):
    """Every byte counts, also that of a comment."""
    monkeypatch.setattr(runs_code, "ROOT", tmp_path)
    for name in ("same.py", "edited.py", "gone.py"):
        (tmp_path / name).write_text("x = 1\n")
    recorded = {path.name: sha256_file(path) for path in tmp_path.iterdir()}
    assert runs_code.changed_since(recorded) == []
    (tmp_path / "edited.py").write_text("x = 1  # The first.\n")
    (tmp_path / "gone.py").unlink()
    assert set(runs_code.changed_since(recorded)) == {"edited.py", "gone.py"}


@pytest.mark.parametrize("change", [os.utime, os.unlink])
def test_code_that_changed_after_it_was_loaded_is_never_taken_for_the_new_one(
    tmp_path, monkeypatch, change
):
    file, module = tmp_path / "lib" / "invented.py", ModuleType("lib.invented")
    file.parent.mkdir()
    file.write_text("x = 1\n")
    module.__file__ = str(file)
    monkeypatch.setattr(runs_code, "ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "lib.invented", module)
    os.utime(file, ns=(1, 1))
    assert runs_code.loaded_source() == {"lib/invented.py": sha256_file(file)}
    change(file)
    recorded = runs_code.loaded_source()
    assert recorded == {"lib/invented.py": runs_code.EDITED}
    assert runs_code.changed_since(recorded) == ["lib/invented.py"]
