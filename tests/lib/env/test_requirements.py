"""Required packages: those that are missing, the install command, and the pins."""

import re
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from lib.env import packages
from lib.env.packages import install_command, known_extras, missing_packages
from lib.project import ROOT

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


@pytest.mark.parametrize("version", ["13.0", "15.0.0", "14.0+local", "16.0.dev20261120"])
def test_every_version_in_the_range_is_accepted(site, version):
    install(site, "rich", version)
    assert missing_packages() == []


def test_absent_and_old_packages_are_named(site):
    assert missing_packages() == ["rich>=13.0"]
    install(site, "rich", "12.6.0")
    assert missing_packages() == ["rich>=13.0 (has 12.6.0)"]


def test_extras_are_required_if_named(site):
    install(site, "rich", "15.0.0")
    assert missing_packages(["logs"]) == ["trackio==1.0"]
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


def declared():
    """Return the ranges of pyproject.toml, its extras, and the pins of requirements.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    return (list(map(Requirement, texts)) for texts in (project["dependencies"], extras, pins))


def test_the_pins_are_in_the_ranges_and_extras_are_pinned():
    ranges, extras, pins = declared()
    pinned = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    assert set(pinned) == {requirement.name for requirement in ranges}
    assert all(r.specifier.contains(pinned[r.name]) for r in ranges)
    assert all(re.fullmatch(r"==[0-9][0-9.]*", str(extra.specifier)) for extra in extras)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    constrained = {line.split("==")[0] for line in constraints if "==" in line}
    assert not constrained & {*pinned, *(extra.name for extra in extras)}
