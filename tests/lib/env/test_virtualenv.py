"""Tests of the managed virtual environment: when it is finished, owned by make, and changeable."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

from lib.env import python_env
from lib.env.python_env import VirtualEnvironment
from lib.errors import ConfigError, RunError
from lib.project import ROOT

PYPROJECT = """
[build-system]
requires = []
build-backend = "editable"
backend-path = ["lib/build"]
[project]
name = "kablate"
version = "0.1.0"
description = "A tree that needs nothing"
requires-python = ">=3.11"
dependencies = []
[project.optional-dependencies]
nothing = []
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a tree with this set-up code and no requirements."""
    root = tmp_path_factory.mktemp("some trees") / "a tree"
    code = shutil.ignore_patterns("__pycache__")
    for name in ("env", "build"):
        shutil.copytree(ROOT / "lib" / name, root / "lib" / name, ignore=code)
    for name in ("__init__", "console", "errors", "files", "project"):
        shutil.copy(ROOT / "lib" / f"{name}.py", root / "lib")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "requirements.txt").write_text("")
    (root / "constraints.txt").write_text("")
    return root


def set_up(tree, *options, **variables):
    """Run ``python -m lib.env`` for the tree's .venv, with a Python outside of it."""
    command = [sys.executable, "-m", "lib.env", "--venv", ".venv", *options]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def finish(venv):
    """Make ``venv`` look like a finished set-up."""
    venv.python.parent.mkdir(parents=True, exist_ok=True)
    venv.python.touch()
    stamp = {
        "digest": python_env.requirements_digest(venv._root),
        "place": venv._place,
        "extras": ["nothing"],
    }
    venv._stamp.write_text(json.dumps(stamp))


@pytest.fixture
def venv(tree, tmp_path):
    return VirtualEnvironment(tmp_path / ".venv", tree)


def test_it_is_made_used_and_not_made_again(tree):
    """In a path with blanks, with PYTHONPATH pointing at another ``lib`` and another ``pip``."""
    (tree.parent / "lib").mkdir()
    (tree.parent / "pip").mkdir()
    (tree.parent / "pip" / "__init__.py").write_text("raise SystemExit('not the real pip')")
    made = set_up(tree, PYTHONPATH=str(tree.parent))
    assert made.returncode == 0, made.stderr
    assert f"{tree}/.venv" in made.stderr and "SETUP" in made.stderr
    python = tree / ".venv" / "bin" / "python"
    code = "import lib; print(lib.__file__)"
    found = subprocess.run(
        [python, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(tree.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == str(tree / "lib" / "__init__.py")
    assert not [path for path in tree.iterdir() if path.name.endswith(("egg-info", "build"))]
    again = set_up(tree, "--extras", "")
    assert (again.returncode, again.stderr) == (0, "")


@pytest.mark.slow
def test_packages_of_another_environment_are_shared_and_its_tree_is_not(tree, tmp_path):
    """The other environment has a package, and is installed for another tree."""
    packages = tmp_path / "other" / "lib" / python_env._VERSION / "site-packages"
    packages.mkdir(parents=True)
    (packages / "shared_module.py").touch()
    (packages / "other.pth").write_text(f"{tmp_path / 'tree'}\n")
    (tmp_path / "tree" / "lib").mkdir(parents=True)
    (tmp_path / "tree" / "lib" / "__init__.py").touch()
    made = set_up(tree, "--share", str(tmp_path / "other"))
    assert made.returncode == 0, made.stderr
    code = "import lib, shared_module; print(lib.__file__)"
    python = tree / ".venv" / "bin" / "python"
    imported = subprocess.run(
        [python, "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert imported.stdout.strip() == str(tree / "lib" / "__init__.py")
    assert {path.name for path in packages.iterdir()} - {"__pycache__"} == {
        "other.pth",
        "shared_module.py",
    }
    assert VirtualEnvironment(tree / ".venv", tree).is_current([])
    shutil.rmtree(tmp_path / "other")
    gone = set_up(tree)
    assert gone.returncode == 2 and "[env.no-shared]" in gone.stderr


@pytest.mark.parametrize("target", ["missing", ".venv"])
def test_an_environment_that_cannot_be_shared_is_refused(venv, target):
    finish(venv)
    with pytest.raises(ConfigError) as caught:
        venv.bring_up([], str(venv.path.parent / target))
    assert caught.value.codes == ["env.no-shared"]
    assert venv.is_current(["nothing"])


def test_an_interrupted_set_up_is_not_current(venv):
    finish(venv)
    assert venv.is_current(["nothing"]) and not venv.is_current(["more"])
    venv._stamp.write_text(json.dumps({"digest": "", "place": "", "extras": []}))
    assert not venv.is_current([])
    venv._stamp.write_text('{"digest": "torn')
    assert not venv.is_current([])


def test_a_moved_or_changed_one_is_not_current(venv, tree):
    finish(venv)
    moved = VirtualEnvironment(venv.path.with_name("elsewhere"), tree)
    venv.path.rename(moved.path)
    assert not moved.is_current([])
    finish(moved)
    assert moved.is_current([])
    moved.python.unlink()
    assert not moved.is_current([])


def test_a_link_and_somebody_elses_folder_are_left_alone(venv, tmp_path):
    assert venv.is_ours()
    (tmp_path / "theirs").mkdir()
    venv.path.symlink_to(tmp_path / "theirs")
    assert not venv.is_ours()
    venv.path.unlink()
    venv.path.mkdir()
    assert not venv.is_ours()
    finish(venv)
    assert venv.is_ours()


def test_a_second_make_waits_for_the_first(venv, monkeypatch):
    monkeypatch.setattr(VirtualEnvironment, "_create", lambda self: pytest.fail("made it twice"))
    finish(venv)
    finished = venv._stamp.read_text()
    venv._stamp.write_text("")
    second = threading.Thread(target=venv.bring_up, args=[[]])
    with open(venv._stamp, "r+") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second.start()
        second.join(0.2)
        assert second.is_alive()
        first.write(finished)
    second.join(5)
    assert not second.is_alive() and venv.is_current([])


def test_without_ensurepip_the_error_names_the_package(venv, monkeypatch):
    monkeypatch.setattr(python_env, "find_spec", lambda name: None if name == "ensurepip" else 1)
    with pytest.raises(ConfigError) as caught:
        venv.bring_up([])
    (problem,) = caught.value.problems
    assert problem.code == "env.missing-package"
    assert problem.next.endswith("apt-get install python3-venv")
    assert not venv.path.exists()


def test_a_failing_pip_leaves_it_unfinished(venv, monkeypatch):
    monkeypatch.setattr(VirtualEnvironment, "_create", lambda self: venv.python.parent.mkdir())
    monkeypatch.setattr(python_env, "_run_pip", lambda command, root: 1)
    with pytest.raises(RunError) as caught:
        venv.bring_up([])
    assert caught.value.codes == ["env.install-failed"]
    assert venv.is_ours() and not venv.is_current([])


def test_extras_of_an_unfinished_set_up_are_not_forgotten(venv, monkeypatch):
    monkeypatch.setattr(VirtualEnvironment, "_create", lambda self: None)
    monkeypatch.setattr(python_env, "_run_pip", lambda command, root: 1)
    for extras in (["nothing"], []):
        with pytest.raises(RunError):
            venv.bring_up(extras)
    assert json.loads(venv._stamp.read_text())["extras"] == ["nothing"]


def test_an_earlier_extra_that_is_none_any_more_is_dropped(venv, monkeypatch):
    venv.path.mkdir(parents=True)
    venv._stamp.write_text(
        json.dumps({"digest": "old", "place": venv._place, "extras": ["former", "nothing"]})
    )
    monkeypatch.setattr(VirtualEnvironment, "_create", lambda self: None)
    monkeypatch.setattr(python_env, "_run_pip", lambda command, root: 1)
    with pytest.raises(RunError):
        venv.bring_up([])
    assert json.loads(venv._stamp.read_text())["extras"] == ["nothing"]
    with pytest.raises(ConfigError) as caught:
        venv.bring_up(["former"])
    assert caught.value.codes == ["env.unknown-extra"]


@pytest.mark.parametrize(
    "shown", ["Downloading torch-2.13.0.whl (888.1 MB)", "Downloading a (2.1 GB)"]
)
def test_large_downloads_are_shown(shown, capsys, tmp_path):
    lines = f"Collecting torch\n  {shown}\n  Downloading b.whl (9.9 MB)\n"
    code = [sys.executable, "-c", f"print({lines!r}, end='')"]
    assert python_env._run_pip(code, tmp_path) == 0
    assert capsys.readouterr().err == f"SETUP   {shown}\n"


@pytest.mark.parametrize("status", [0, 1])
def test_warnings_of_pip_are_shown_only_if_it_fails(status, capsys, tmp_path):
    lines = "WARNING: Location 'a' is ignored\n" * 3
    code = f"import sys; sys.stderr.write({lines!r}); sys.exit({status})"
    assert python_env._run_pip([sys.executable, "-c", code], tmp_path) == status
    shown = capsys.readouterr().err
    assert shown == lines if status else "3" in shown and "Location" not in shown
