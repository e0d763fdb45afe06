"""Code of a run: digests of what is loaded, what is uncommitted, and the patch that restores it."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
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

Git = Callable[..., bytes]


@pytest.fixture
def git(tmp_path, monkeypatch) -> Git:
    """A repository with two packages and a committed state, taken for this tree."""
    root = tmp_path / "tree"
    for name in ("gpt2/model.py", "gpt2/old.py", "lib/a.py", "docs/page.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n")
    (root / "lib" / "table.bin").write_bytes(bytes(range(256)))
    (root / ".gitignore").write_text("results\nscratch.py\n")
    monkeypatch.setattr(runs_code, "ROOT", root)

    def run(*words: str) -> bytes:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", *identity, *words]
        return subprocess.run(command, cwd=root, check=True, capture_output=True).stdout

    run("init", "-q", "-b", "trunk")
    run("add", "-A")
    run("commit", "-qm", "all")
    return run


@pytest.fixture
def root(git) -> Path:
    return runs_code.ROOT


def test_a_committed_tree_leaves_no_patch(root, git, tmp_path, monkeypatch):
    (tmp_path / "code.diff").write_text("of an earlier start\n")
    for name in ("results/table.md", "texts/tool.py"):
        (root / name).parent.mkdir()
        (root / name).write_text("# Nothing imports it.\n")
    (root / "gpt2" / "model.py").touch()
    # The caller's repository is not asked; git sets these variables for hooks.
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", other], check=True)
    monkeypatch.chdir(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    state = git_state()
    monkeypatch.delenv("GIT_DIR")
    monkeypatch.delenv("GIT_WORK_TREE")
    sha = git("rev-parse", "HEAD").decode().strip()
    assert state == {"git_sha": sha, "branch": "trunk", "dirty_tree": False}
    assert describe_tree() == "" and uncommitted_problems("paper_repro", allowed=False) == []
    assert write_code_patch(tmp_path) is None
    assert not (tmp_path / "code.diff").exists()


def edit(root: Path, git: Git) -> None:
    """One of everything."""
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


def code(root: Path) -> dict[str, bytes]:
    """Every file that is code or known to git."""
    found = [p for p in root.rglob("*") if p.is_file() and ".git" not in p.parts]
    return {str(p.relative_to(root)): p.read_bytes() for p in found if p.suffix != ".txt"}


def test_the_patch_makes_the_same_code_from_the_commit(root, git, tmp_path):
    edit(root, git)
    assert git_state()["dirty_tree"] is True
    found = head_commit()
    tracked = ["gpt2/model.py", "gpt2/old.py", "lib/staged.py", "lib/table.bin"]
    assert found.uncommitted == [*tracked, *found.untracked]
    new = ["gpt2/Kconfig.mine", "gpt2/scratch.py", "lib/empty.py", "lib/nové.py"]
    assert found.untracked == new
    record = write_code_patch(tmp_path)
    patch = (tmp_path / "code.diff").read_bytes()
    assert record == {"file": "code.diff", "sha256": hashlib.sha256(patch).hexdigest()}
    # A clone without the objects of the index.
    again = tmp_path / "again"
    git("clone", "-q", "--no-local", str(root), str(again))
    assert code(again) != code(root)
    git("-C", str(again), "apply", str(tmp_path / "code.diff"))
    assert code(again) == code(root)


def test_a_user_s_settings_change_no_patch(root, git, tmp_path):
    edit(root, git)
    record = write_code_patch(tmp_path)
    settings = dict.fromkeys(("diff.noprefix", "diff.mnemonicPrefix"), "true")
    for name, value in {**settings, "color.diff": "always", "diff.external": "false"}.items():
        git("config", name, value)
        assert write_code_patch(tmp_path) == record, name
        git("config", "--unset", name)


def test_one_line_says_what_is_not_committed_and_what_to_type(root, git):
    edit(root, git)
    (problem,) = uncommitted_problems("paper_repro", allowed=False)
    assert problem.code == "code.uncommitted" and "make ALLOW_DIRTY=y" in problem.next
    assert "gpt2/model.py, gpt2/old.py, lib/staged.py and 5 more" in problem.what
    assert uncommitted_problems("paper_repro", allowed=True) == []
    assert uncommitted_problems("maxout_speed", allowed=False) == []


def test_what_git_cannot_tell_is_not_clean(root, git, tmp_path, monkeypatch):
    unknown = {"git_sha": None, "branch": None, "dirty_tree": "unknown"}
    # A folder inside another repository has no commit.
    inner = root / "lib"
    monkeypatch.setattr(runs_code, "ROOT", inner)
    assert git_state() == unknown
    (problem,) = uncommitted_problems("paper_repro", allowed=False)
    assert problem.code == "code.uncommitted" and "ALLOW_DIRTY=y" in problem.next
    assert "commit it" not in str(problem) and "difference" not in str(problem)
    assert "fatal: not a git repository" in describe_tree()
    assert write_code_patch(tmp_path) is None
    empty = tmp_path / "empty"
    subprocess.run(["git", "init", "-q", empty], check=True)
    monkeypatch.setattr(runs_code, "ROOT", empty)
    assert git_state() == unknown and "does not have any commits yet" in describe_tree()
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


def test_a_patch_that_git_cannot_make_is_an_error(root, git, tmp_path):
    edit(root, git)
    # An object that git requires for the difference.
    (blob,) = git("rev-parse", "HEAD:gpt2/old.py").decode().split()
    (root / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(RunError) as caught:
        write_code_patch(tmp_path)
    assert caught.value.codes == ["git.failed"]
    assert blob in caught.value.problems[0].what


def test_loaded_modules_are_digested_unless_they_only_run_or_read():
    import gpt2.study.step  # noqa: F401

    recorded = runs_code.loaded_source()
    assert recorded["lib/files.py"] == sha256_file(ROOT / "lib/files.py")
    assert all(name.startswith(("gpt2/", "lib/")) for name in recorded)
    assert "gpt2/study/step.py" not in recorded
    # An older record may have such files.
    assert runs_code.changed_since(recorded | {"gpt2/study/step.py": "0" * 64}) == []


def test_edited_and_missing_files_are_named(tmp_path, monkeypatch):
    """Every byte counts, also that of a comment."""
    monkeypatch.setattr("lib.runs.code.ROOT", tmp_path)
    for name in ("same.py", "edited.py", "gone.py"):
        (tmp_path / name).write_text("x = 1\n")
    recorded = {path.name: sha256_file(path) for path in tmp_path.iterdir()}
    assert runs_code.changed_since(recorded) == []
    (tmp_path / "edited.py").write_text("x = 1  # The first.\n")
    (tmp_path / "gone.py").unlink()
    assert set(runs_code.changed_since(recorded)) == {"edited.py", "gone.py"}


@pytest.mark.parametrize("event", ["edited", "removed"])
def test_code_that_changed_after_it_was_loaded_is_never_taken_for_the_new_one(
    tmp_path, monkeypatch, event
):
    (tmp_path / "lib").mkdir()
    file = tmp_path / "lib" / "invented.py"
    file.write_text("x = 1\n")
    module = ModuleType("lib.invented")
    module.__file__ = str(file)
    monkeypatch.setattr("lib.runs.code.ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "lib.invented", module)
    os.utime(file, ns=(1, 1))
    assert runs_code.loaded_source() == {"lib/invented.py": sha256_file(file)}
    os.utime(file) if event == "edited" else file.unlink()
    recorded = runs_code.loaded_source()
    assert recorded == {"lib/invented.py": runs_code.EDITED}
    assert runs_code.changed_since(recorded) == ["lib/invented.py"]


def test_a_worker_loads_what_is_excluded():
    """A move of a file, or an import that goes, would leave a name behind that excludes nothing."""
    for name in ("gpt2.running.launch", "gpt2.training.loop", "lib.kablate"):
        import_module(name)

    files = [vars(module).get("__file__") or "" for module in list(sys.modules.values())]
    loaded = [file.removeprefix(f"{ROOT}/") for file in files]
    excluded = [name for name in loaded if not runs_code.makes_results(name)]
    assert [n for n in runs_code.NOT_TRAINING if not any(e.startswith(n) for e in excluded)] == []
