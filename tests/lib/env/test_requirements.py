"""Installed packages compared with requirements, the install command, and the build backend."""

import json
import sys

import pytest

from lib.env import python_env
from lib.env.python_env import (
    Requirement,
    RequirementReport,
    check_requirements,
    default_requirements,
    extra_requirements,
    install_command,
    requirements_digest,
)
from lib.errors import ConfigError
from lib.project import ROOT

TORCH = Requirement("torch", ">=", "2.11", "2.13.0")
RICH = Requirement("rich", ">=", "13.0", "15.0.0")


def install(site, name, version, url=None):
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    if url:
        info.joinpath("direct_url.json").write_text(json.dumps({"url": url}))


@pytest.fixture
def tree(tmp_path):
    tree = tmp_path / "a tree"
    tree.mkdir()
    return tree


def test_everything_is_there(tmp_path, tree):
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "kablate", "0.1.0", tree.as_uri())
    findings = check_requirements(tree, [TORCH], [str(tmp_path)])
    assert findings.complete and not findings.differing


def test_absent_old_and_other_packages_are_told_apart(tmp_path, tree):
    install(tmp_path, "torch", "2.9.0")
    findings = check_requirements(tree, [TORCH, RICH], [str(tmp_path)])
    assert not findings.complete and not findings.installed
    assert findings.lacking == [(TORCH, "2.9.0"), (RICH, "")]
    text = findings.describe_lacking()
    assert "torch >= 2.11" in text and "2.9.0" in text and "rich" in text and "editable" in text


def test_another_version_in_range_is_accepted_and_named(tmp_path, tree):
    install(tmp_path, "torch", "2.12.1")
    install(tmp_path, "kablate", "0.1.0", tree.as_uri())
    findings = check_requirements(tree, [TORCH], [str(tmp_path)])
    assert findings.complete
    assert findings.differing == [(TORCH, "2.12.1")]
    assert "torch 2.12.1" in findings.describe_differing()
    assert "2.13.0" in findings.describe_differing()


@pytest.mark.parametrize("url", [None, "file:///another/tree"])
def test_an_install_of_another_tree_does_not_count(tmp_path, tree, url):
    install(tmp_path, "kablate", "0.1.0", url)
    assert not check_requirements(tree, [], [str(tmp_path)]).installed


def test_the_command_uses_pip_where_there_is_pip(tree):
    command = install_command(tree, RequirementReport([(RICH, "")], [], installed=False))
    assert command == f"{sys.executable} -m pip install rich==15.0.0 -e '{tree}'"


def test_the_command_uses_uv_where_there_is_no_pip(monkeypatch, tree):
    monkeypatch.setattr(python_env, "find_spec", lambda name: None)
    monkeypatch.setattr(python_env.shutil, "which", lambda name: "/bin/uv")
    command = install_command(tree, RequirementReport([(RICH, "")], [], installed=True))
    assert command.startswith(f"uv pip install --python {sys.executable} rich==15.0.0")


DEFAULT_SET = {"torch", "kconfiglib", "numpy", "wandb", "black", "transformers", "pytest"}


def write_tree(root, dependencies, pins, extras=""):
    root.joinpath("pyproject.toml").write_text(
        f"[project]\ndependencies = {dependencies}\n[project.optional-dependencies]\n{extras}\n"
    )
    root.joinpath("requirements.txt").write_text(pins)
    root.joinpath("constraints.txt").write_text("")
    return root


@pytest.mark.parametrize(
    ("operator", "bound", "version", "accepted"),
    [
        (">=", "2.11", "2.13.0", True),
        (">=", "2.11", "2.9.1", False),
        (">=", "2.0", "2", True),
        (">=", "2.11", "2.13.0+cpu", True),
        (">=", "1.0", "", False),
        ("==", "14.1.0", "14.1", True),
        ("==", "14.1.0", "14.1.1a4", False),
    ],
)
def test_range(operator, bound, version, accepted):
    assert Requirement("p", operator, bound, "9").accepts(version) is accepted


def test_a_build_label_is_the_tested_version():
    torch = Requirement("torch", ">=", "2.11", "2.13.0")
    assert torch.is_pin("2.13.0+cpu") and not torch.is_pin("2.13.1")


def test_the_default_set_is_pinned_in_its_ranges():
    requirements = default_requirements(ROOT)
    assert {requirement.name for requirement in requirements} > DEFAULT_SET
    assert all(requirement.accepts(requirement.pin) for requirement in requirements)
    assert "torch==2.13.0" in map(str, requirements)


def test_pins_and_ranges_name_the_same_packages():
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if "==" in line
    }
    assert pinned == {requirement.name for requirement in default_requirements(ROOT)}


def test_a_package_without_a_pin_is_an_error(tmp_path):
    with pytest.raises(ConfigError) as caught:
        default_requirements(write_tree(tmp_path, ["a>=1", "b>=2"], "a==1.5\n"))
    (problem,) = caught.value.problems
    assert problem.code == "env.unpinned-package" and problem.what.startswith("b: ")


def test_extras_are_pinned_and_unknown_ones_are_refused(tmp_path):
    tree = write_tree(tmp_path, [], "", 'plots = ["matplotlib==3.11.2"]\nlogs = ["trackio==1.0"]')
    assert [str(r) for r in extra_requirements(tree, ["plots"])] == ["matplotlib==3.11.2"]
    with pytest.raises(ConfigError) as caught:
        extra_requirements(tree, ["plot"])
    (problem,) = caught.value.problems
    assert problem.code == "env.unknown-extra"
    assert "plot " in problem.what and "plots, logs" in problem.what


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.txt", "constraints.txt"])
def test_digest_follows_every_file(tmp_path, name):
    before = requirements_digest(write_tree(tmp_path, [], ""))
    with open(tmp_path / name, "a") as stream:
        stream.write("# changed\n")
    assert requirements_digest(tmp_path) != before
