"""Conditions of the environment: what passes, and the problems of what does not."""

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lib.env.options import EnvironmentConfig
from lib.env.packages import Interpreter, installed_packages
from lib.env.preflight import FOREIGN_FILES, environment_problems
from lib.errors import Problem

KINDS = ("conda", "uv", "venv")
HERE = {"CONDA_PREFIX": "/envs/llmhe", "CONDA_DEFAULT_ENV": "llmhe"}


def of_kind(kind: str, name: str = "llmhe") -> Interpreter:
    return Interpreter(kind, name, "3.13.1", Path(f"/envs/{name}"), f"/envs/{name}/bin/python")


def problems(
    config: EnvironmentConfig,
    condition: str,
    here: Interpreter = of_kind("conda"),
    root: Path = Path("/nowhere"),
    variables: Mapping[str, str] = HERE,
) -> list[Problem]:
    found = environment_problems(config, here, root / "results" / "study", root, variables)
    return found[condition]


def words(found: list[Problem], code: str) -> str:
    """Check that there is one problem with ``code``; return its text."""
    (problem,) = found
    assert problem.code == code
    return problem.what


@pytest.mark.parametrize(("asked", "kind"), product(KINDS, (*KINDS, "system")))
def test_each_policy_takes_its_own_kind_alone(config, asked, kind):
    assert problems(config, "environment", of_kind(kind)) == []
    found = problems(replace(config, policy=asked, name="llmhe"), "environment", of_kind(kind))
    if kind == asked:
        assert found == []
    else:
        said = words(found, "env.wrong-kind")
        assert f"ENV_POLICY={asked}" in said and "/envs/llmhe/bin/python" in said
        assert ("no environment" if kind == "system" else f"{kind} environment") in said


@pytest.mark.parametrize(
    ("policy", "expected", "name", "code"),
    [
        ("conda", "llmhe", "other", "env.wrong-name"),
        ("conda", "llmhe", "base", "env.wrong-name"),
        ("conda", "base", "base", ""),
        # Empty accepts any.
        ("venv", "", "x", ""),
    ],
)
def test_the_name(config, policy, expected, name, code):
    wanted = replace(config, policy=policy, name=expected)
    variables = {"CONDA_PREFIX": f"/envs/{name}"}
    found = problems(wanted, "environment", of_kind(policy, name), variables=variables)
    assert [problem.code for problem in found] == [code] * bool(code)
    if code:
        assert f"ENV_NAME={expected}" in found[0].what and f"{name} (/envs/{name})" in found[0].what


@pytest.mark.parametrize("variables", [{"CONDA_PREFIX": "/envs/other"}, {}])
def test_a_conda_environment_that_is_not_activated(conda_config, variables):
    found = problems(conda_config, "environment", variables=variables)
    assert "CONDA_PREFIX=/envs/llmhe" in words(found, "env.not-activated")
    assert found[0].next == "type: conda activate llmhe"


@pytest.mark.parametrize(
    ("asked", "passes"),
    [
        *((prefix, True) for prefix in ("", "3.13", "3.13.1")),
        *((prefix, False) for prefix in ("3.1", "3.12", "3.13.2", "3.13.10")),
    ],
)
def test_python_by_as_many_parts_as_are_said(config, asked, passes):
    found = problems(replace(config, python=asked), "python")
    assert passes == (found == [])
    if not passes:
        said = words(found, "env.wrong-python")
        assert f"ENV_PYTHON={asked}:" in said and "Python 3.13.1" in said


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


def lock_problems(config: EnvironmentConfig, lock: Path, enforce: bool = True) -> list[Problem]:
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
