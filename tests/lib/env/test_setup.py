"""Tests of the set-up of the environment: when make runs it, what it creates, and what it leaves."""

import fcntl
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from lib import _start
from lib.build import editable
from lib.env import packages, setup
from lib.errors import RunError
from lib.project import ROOT
from tests.errors import error_of
from tests.make_command import make

PYPROJECT = """
[build-system]
requires = []
build-backend = "editable"
backend-path = ["lib/build"]
[project]
name = "kablate"
version = "0.1.0"
description = "A tree that needs little"
requires-python = ">=3.11"
dependencies = ["packaging>=1.0"]
[project.scripts]
kablate = "lib.project:main"
[project.optional-dependencies]
nothing = []
more = []
"""
# No other tree, and no interpreter of the tests.
ENVIRONMENT = {"PYTHON": "", "VIRTUAL_ENV": "", "CONDA_PREFIX": ""}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a tree with this set-up code, whose only requirement needs no network."""
    root = tmp_path_factory.mktemp("some trees") / "a tree"
    for name in ("env", "build"):
        code = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "lib" / name, root / "lib" / name, ignore=code)
    for path in (ROOT / "lib").glob("*.py"):
        shutil.copy(path, root / "lib")
    shutil.copy(ROOT / "Makefile", root)
    (root / "pyproject.toml").write_text(PYPROJECT)
    version = write_wheel(root.parent)
    pins = f"--no-index\n--find-links {root.parent.as_uri()}\npackaging=={version}\n"
    (root / "requirements.txt").write_text(pins)
    (root / "constraints.txt").write_text("")
    return root


def write_wheel(folder):
    """Write a wheel of the installed package packaging; return its version."""
    installed = distribution("packaging")
    name = f"packaging-{installed.version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path in installed.files:
            if path.suffix != ".pyc":
                archive.write(path.locate(), str(path))
    return installed.version


def set_up(tree, *words, **variables):
    return make("setup", *words, cwd=tree, **ENVIRONMENT, **variables)


def stamp(tree):
    return tree / ".venv" / setup.STAMP


def stamp_lines(tree):
    return stamp(tree).read_text().splitlines()


@pytest.mark.slow
def test_it_is_made_used_and_not_made_again(tree):
    """In a path with blanks, with PYTHONPATH pointing at another ``lib`` and another ``pip``."""
    (tree.parent / "lib").mkdir()
    (tree.parent / "pip").mkdir()
    (tree.parent / "pip" / "__init__.py").write_text("raise SystemExit('not the real pip')")
    made = set_up(tree, "EXTRAS=nothing", PYTHONPATH=str(tree.parent))
    assert made.returncode == 0, made.stderr
    assert made.stdout == "" and "is ready" in made.stderr
    command = [tree / ".venv/bin/python", "-c", "import lib; print(lib.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(tree.parent)}
    imported = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert imported.stdout.strip() == str(tree / "lib" / "__init__.py"), imported.stderr
    assert "from lib.project import main" in (tree / ".venv/bin/kablate").read_text()
    assert not [path for path in tree.iterdir() if path.name.endswith(("egg-info", "build"))]
    assert stamp_lines(tree) == [f"{tree} .venv", "nothing"]
    assert set_up(tree).stderr == ""


def test_a_plain_install_is_refused_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"runs from its tree: pip install -e {tmp_path}"):
        editable.build_wheel(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def made(tmp_path):
    """Return a tree whose .venv/bin/python only writes its arguments to a file, and is finished."""
    root = tmp_path / "it's a tree"
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*" >> called\n')
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", root)
    (root / "lib").mkdir()
    shutil.copy(ROOT / "lib/commands.py", root / "lib")
    for name in ("pyproject.toml", "requirements.txt", "constraints.txt"):
        (root / name).touch()
        os.utime(root / name, (0, 0))
    stamp(root).write_text(f"{root} .venv\ndev\nnothing\n")
    return root


def newer(name):
    return lambda root: os.utime(root / name, (os.stat(stamp(root)).st_mtime + 5,) * 2)


def stamped(text):
    return lambda root: stamp(root).write_text(text)


def link(root):
    (root / ".venv").rename(root / "elsewhere")
    (root / ".venv").symlink_to("elsewhere")


SETUP = "-m lib.env.setup --venv .venv --extras"
CHECK = "-m lib.env.setup --active .venv/bin/python --extras"


@pytest.mark.parametrize(
    ("change", "extras", "expected"),
    [
        (None, "", ""),
        (None, "dev,nothing", ""),
        (None, "nothing more", f"{SETUP} nothing more"),
        (newer("pyproject.toml"), "", SETUP),
        (newer("requirements.txt"), "", SETUP),
        (newer("constraints.txt"), "", SETUP),
        # New, unfinished, moved.
        (stamped(""), "", SETUP),
        (stamped("\ndev\n"), "", SETUP),
        (stamped("/another/tree .venv\ndev\n"), "", SETUP),
        # The environment of a user is only checked.
        (lambda root: stamp(root).unlink(), "", CHECK),
        (link, "", CHECK),
    ],
)
def test_make_runs_the_set_up_that_is_due(made, change, extras, expected):
    if change:
        change(made)
    assert set_up(made, f"EXTRAS={extras}").returncode == 0
    called = made / "called"
    assert (called.read_text().strip() if called.exists() else "") == expected


class Commands(list):
    """The commands that a set-up runs, instead of running them; the ``failing`` one fails."""

    failing = ""

    def __call__(self, command, *, quiet=False):
        words = shlex.join(map(str, command))
        self.append(f"{words} (quiet)" if quiet else words)
        if self.failing and self.failing in words:
            raise RunError(setup.Problem("failed", code="env.install-failed"))
        if "-m venv" in words:
            (Path(command[-1]) / "bin").mkdir()
            (Path(command[-1]) / "bin" / "python").touch()


@pytest.fixture
def commands(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    recorded = Commands()
    monkeypatch.setattr(setup, "_run", recorded)
    return recorded


def kinds(commands):
    kind = {"-m venv ": "venv", "-m pip install ": "pip", "-m lib.env.setup ": "check"}
    return [name for command in commands for words, name in kind.items() if words in command]


def test_a_new_one_is_created_installed_and_checked_and_keeps_its_extras(
    tmp_path, commands, monkeypatch
):
    setup.set_up(".venv", ["nothing"])
    assert kinds(commands) == ["venv", "pip", "check"]
    assert [command.endswith("(quiet)") for command in commands] == [False, True, False]
    assert f"-r {tmp_path}/requirements.txt -c {tmp_path}/constraints.txt" in commands[1]
    assert f"-e '{tmp_path}[nothing]'" in commands[1]
    assert stamp_lines(tmp_path) == [f"{tmp_path} .venv", "nothing"]
    commands.clear()
    # An earlier extra that is none any more is dropped.
    stamp(tmp_path).write_text(f"{tmp_path} .venv\nformer\nnothing\n")
    monkeypatch.setenv("V", "1")
    setup.set_up(".venv", ["more"])
    assert kinds(commands) == ["pip", "check"] and "[more,nothing]" in commands[0]
    assert "(quiet)" not in commands[0]


def test_a_moved_or_dead_one_is_created_anew(tmp_path, commands):
    setup.set_up(".venv", [])
    (tmp_path / ".venv").rename(tmp_path / "moved")
    (tmp_path / "moved" / "remains").touch()
    setup.set_up("moved", [])
    assert not (tmp_path / "moved" / "remains").exists()
    (tmp_path / "moved" / "bin" / "python").unlink()
    setup.set_up("moved", [])
    assert kinds(commands) == ["venv", "pip", "check"] * 3


@pytest.mark.parametrize("failing", ["-m venv", "-m pip", "-m lib.env.setup"])
def test_a_failure_leaves_it_unfinished_with_its_extras(tmp_path, commands, failing):
    commands.failing = failing
    with pytest.raises(RunError) as caught:
        setup.set_up(".venv", ["nothing"])
    assert caught.value.codes == ["env.install-failed"]
    assert stamp_lines(tmp_path) == ["", "nothing"]
    commands.failing = ""
    commands.clear()
    setup.set_up(".venv", [])
    assert kinds(commands) == ["venv", "pip", "check"] and "[nothing]" in commands[1]


def test_a_second_make_waits_for_the_first(tmp_path, commands):
    (tmp_path / ".venv").mkdir()
    stamp(tmp_path).touch()
    second = threading.Thread(target=setup.set_up, args=[".venv", ["nothing"]])
    with open(stamp(tmp_path), "r+") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second.start()
        second.join(0.2)
        assert second.is_alive()
        first.write(f"{tmp_path} .venv\nnothing\n")
    second.join(5)
    assert not second.is_alive() and commands == []


@pytest.mark.parametrize(
    ("quiet", "width", "code", "shown"),
    [
        (True, 20, 0, "\r\x1b[Kfirst\r\x1b[K" + "x" * 19 + "\r\x1b[K"),
        (False, 20, 0, "first\n" + "x" * 100 + "\n"),
        # A command that fails shows its messages.
        (True, None, 3, "first\n" + "x" * 100 + "\n"),
    ],
)
def test_the_lines_of_pip_are_one_line_of_a_terminal_if_quiet(
    capfd, monkeypatch, quiet, width, code, shown
):
    command = [sys.executable, "-Sc", f"print('first'); print('x' * 100); raise SystemExit({code})"]
    monkeypatch.setattr(setup.console, "terminal_columns", lambda stream: width)
    if code:
        with pytest.raises(RunError) as caught:
            setup._run(command, quiet=quiet)
        assert caught.value.codes == ["env.install-failed"] and sys.executable in str(caught.value)
    else:
        setup._run(command, quiet=quiet)
    assert capfd.readouterr().err == shown


def test_an_unknown_extra_and_a_folder_of_the_user_are_errors(tmp_path, commands, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["setup", "--venv", ".venv", "--extras", "nothign"])
    error = error_of(setup.main)
    assert error.codes == ["env.unknown-extra"] and "nothing, more" in str(error)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    assert error_of(setup.set_up, ".venv", []).codes == ["env.not-managed"] and commands == []


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 14, 0)])
def test_a_python_of_another_version_is_refused_by_name(monkeypatch, version):
    """By the set-up, by every command, and by pip."""
    named = ".".join(map(str, version))
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.delitem(sys.modules, "lib.env.setup")
    with pytest.raises(SystemExit, match=f"3.13 is required, {sys.executable} is {named}"):
        runpy.run_module("lib.env.setup")
    assert _start.advice().startswith("type")
    requirement = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert named not in SpecifierSet(requirement) and "3.13.9" in SpecifierSet(requirement)
