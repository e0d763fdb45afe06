"""Conditions of the environment: what passes, and the problems of what does not."""

import re
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from lib.env.packages import Interpreter, installed_packages
from lib.env.preflight import FOREIGN_FILES, environment_problems

KINDS = ("conda", "uv", "venv")


def of_kind(kind, name="llmhe"):
    return Interpreter(kind, name, "3.13.1", Path(f"/envs/{name}"), f"/envs/{name}/bin/python")


CONDA = of_kind("conda")


def problems(config, condition, here=CONDA, root=Path("/nowhere"), variables=None):
    variables = {"CONDA_PREFIX": str(here.prefix)} if variables is None else variables
    found = environment_problems(config, here, root / "results" / "study", root, variables)
    return found[condition]


def words(found, code):
    """Check that there is one problem with ``code``; return its text."""
    (problem,) = found
    assert problem.code == code
    return problem.what


@pytest.mark.parametrize(
    ("changes", "here"),
    [
        ({}, of_kind("system")),
        *(({"policy": kind, "name": "llmhe"}, of_kind(kind)) for kind in KINDS),
        ({"policy": "conda", "name": "base"}, of_kind("conda", "base")),
        # Empty accepts any.
        ({"policy": "venv", "name": ""}, of_kind("venv", "x")),
        *(({"python": prefix}, CONDA) for prefix in ("", "3.13", "3.13.1")),
    ],
)
def test_the_environment_that_is_asked_for(config, changes, here):
    found = environment_problems(
        replace(config, **changes), here, Path(), Path(), {"CONDA_PREFIX": str(here.prefix)}
    )
    assert found["environment"] == found["python"] == []


@pytest.mark.parametrize(
    ("changes", "here", "code", "parts"),
    [
        *(
            ({"policy": asked}, of_kind(kind), "wrong-kind", [f"ENV_POLICY={asked}", f"a {kind} "])
            for asked, kind in permutations(KINDS, 2)
        ),
        ({"policy": "uv"}, of_kind("system"), "wrong-kind", ["/envs/llmhe/bin/python", "no env"]),
        *(
            (
                {"policy": "conda", "name": "llmhe"},
                of_kind("conda", name),
                *("wrong-name", ["ENV_NAME=llmhe", f"{name} (/envs/{name})"]),
            )
            for name in ("other", "base")
        ),
        *(
            ({"python": asked}, CONDA, "wrong-python", [f"ENV_PYTHON={asked}:", "Python 3.13.1"])
            for asked in ("3.1", "3.12", "3.13.2", "3.13.10")
        ),
    ],
)
def test_another_environment_is_named(config, changes, here, code, parts):
    condition = "python" if "python" in changes else "environment"
    said = words(problems(replace(config, **changes), condition, here), f"env.{code}")
    assert all(part in said for part in parts)


@pytest.mark.parametrize("variables", [{"CONDA_PREFIX": "/envs/other"}, {}])
def test_a_conda_environment_that_is_not_activated(conda_config, variables):
    found = problems(conda_config, "environment", variables=variables)
    assert "CONDA_PREFIX=/envs/llmhe" in words(found, "env.not-activated")
    assert found[0].next == "type: conda activate llmhe"


def test_traces_of_other_tools(conda_config, tmp_path):
    assert problems(conda_config, "foreign tools", root=tmp_path) == []
    for name in FOREIGN_FILES:
        (tmp_path / name).symlink_to(tmp_path / "gone")
    found = problems(conda_config, "foreign tools", root=tmp_path)
    assert [problem.where for problem in found] == [str(tmp_path / name) for name in FOREIGN_FILES]
    assert {problem.code for problem in found} == {"env.foreign-file"}
    allowed = replace(conda_config, forbid_foreign=False)
    assert problems(allowed, "foreign tools", root=tmp_path) == []


def test_what_the_tree_needs_is_here(config, monkeypatch):
    assert problems(config, "packages") == []
    monkeypatch.setattr(sys, "path", [])
    said = words(problems(config, "packages"), "env.missing-package")
    assert "torch>=2.11, kconfiglib" in said


def lock_problems(config, lock, enforce=True):
    wanted = replace(config, lock_file=lock.name, lock_enforce=enforce)
    return problems(wanted, "lock file", root=lock.parent)


# Lock files of uv, of PEP 751 and plain lists.
@pytest.mark.parametrize(
    ("name", "head", "line"),
    [
        ("uv.lock", "version = 1\n", '[[package]]\nname = "{}"\nversion = "{}"\n'),
        ("pylock.toml", "", '[[packages]]\nname = "{}"\nversion = "{}"\n'),
        ("pins.txt", "# pins\n", "{}=={} ; python_version > '3' \\\n"),
    ],
)
def test_installed_packages_are_those_of_the_lock_file(config, tmp_path, name, head, line):
    """Names in another spelling are the same, and packages of another platform may be missing."""
    here, lock = installed_packages(), tmp_path / name
    lines = [line.format(n.replace("-", "_").upper(), version) for n, version in here.items()]
    lock.write_text(head + "".join([*lines, line.format("elsewhere", "1")]))
    assert lock_problems(config, lock) == []
    text = lock.read_text().replace("NUMPY", "BUMPY")
    lock.write_text(text.replace(here["rich"], "0.0.1"))
    said = words(lock_problems(config, lock), "lock-file.mismatch")
    assert "ENV_LOCK_ENFORCE=y:" in said
    assert f"numpy {here['numpy']} (not " in said
    assert re.search(rf"rich {re.escape(here['rich'])} \(.*0\.0\.1\)", said)
    assert lock_problems(config, lock, enforce=False) == []


@pytest.mark.parametrize(
    ("content", "kind"),
    [(None, "missing"), (b"version = 1\n", "empty"), (b"[[[", "damaged"), (b"\xff", "damaged")],
)
def test_a_lock_file_without_packages(config, tmp_path, content, kind):
    if content:
        (tmp_path / "uv.lock").write_bytes(content)
    words(lock_problems(config, tmp_path / "uv.lock", enforce=False), f"lock-file.{kind}")
