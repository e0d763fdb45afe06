"""The running environment, the packages that it must have, the install command, and the pins."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lib.env import packages
from lib.env.packages import current_interpreter, install_command, known_extras, missing_packages
from lib.project import ROOT


@pytest.mark.parametrize(
    ("files", "base", "expected"),
    [
        ({"pyvenv.cfg": "home = /usr/bin\nversion = 3.13.1\n"}, "/usr", ("venv", "mine")),
        ({"pyvenv.cfg": "implementation = CPython\nuv = 0.9.8\n"}, "/usr", ("uv", "mine")),
        # The word in a path is not a key.
        ({"pyvenv.cfg": "home = /opt/uv/bin\ncommand = /opt/uv/x\n"}, "/usr", ("venv", "mine")),
        ({"conda-meta/history": ""}, None, ("conda", "mine")),
        ({"conda-meta/history": "", "condabin/conda": ""}, None, ("conda", "base")),
        # A virtual environment of conda's Python.
        ({"conda-meta/history": "", "pyvenv.cfg": "home = /envs/x\n"}, "/envs", ("venv", "mine")),
        ({}, None, ("system", "mine")),
    ],
)
def test_kinds_of_environments(tmp_path, monkeypatch, files, base, expected):
    """As the files of the interpreter say, and no variable."""
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "llmhe")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "llmhe"))
    prefix = tmp_path / "mine"
    prefix.mkdir()
    for name, text in files.items():
        (prefix / name).parent.mkdir(exist_ok=True)
        (prefix / name).write_text(text)
    found = current_interpreter(prefix, Path(base) if base else prefix)
    assert (found.kind, found.name) == expected


PYPROJECT = """
[project]
dependencies = ["torch>=2.11", "rich>=13.0", "kconfiglib==14.1.0"]
[project.optional-dependencies]
logs = ["trackio==1.0"]
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return the only folder of packages, and install torch and kconfiglib into it."""
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    install(tmp_path / "site", "torch", "2.13.0+cpu")
    install(tmp_path / "site", "kconfiglib", "14.1.0")
    return tmp_path / "site"


def install(site, name, version):
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        *((version, []) for version in ("13.0", "15.0.0", "14.0+local", "16.0.dev20261120")),
        ("12.6.0", ["rich>=13.0 (has 12.6.0)"]),
        (None, ["rich>=13.0"]),
    ],
)
def test_packages_that_are_absent_or_out_of_the_range_are_named(site, version, missing):
    if version:
        install(site, "rich", version)
    assert missing_packages() == missing
    assert missing_packages(["logs"]) == [*missing, "trackio==1.0"]
    assert known_extras() == ["logs"]


def test_without_the_parser_the_environment_is_incomplete(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    (missing,) = missing_packages()
    assert missing.startswith("packaging")


def test_the_command_installs_the_pins_with_pip_or_uv(monkeypatch):
    pins = ["-r", f"{ROOT}/requirements.txt", "-c", f"{ROOT}/constraints.txt"]
    assert install_command("/a/python") == [
        *("/a/python", "-m", "pip", "install", *pins, "-e", str(ROOT))
    ]
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    monkeypatch.setattr(packages.shutil, "which", lambda name: "/bin/uv")
    assert install_command("/a/python", ["dev", "triton"]) == [
        *("uv", "pip", "install", "--python", "/a/python", *pins, "-e", f"{ROOT}[dev,triton]")
    ]


def test_the_pins_are_in_the_ranges_and_extras_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [Requirement(text) for text in project["dependencies"]]
    optional = project["optional-dependencies"].values()
    extras = [Requirement(text) for texts in optional for text in texts]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert set(pinned) == {requirement.name for requirement in ranges}
    assert all(r.specifier.contains(pinned[r.name]) for r in ranges)
    assert all(re.fullmatch(r"==[0-9][0-9.]*", str(extra.specifier)) for extra in extras)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    constrained = {line.split("==")[0] for line in constraints if "==" in line}
    assert not constrained & {*pinned, *(extra.name for extra in extras)}
