"""Tests of the comparison of installed packages with requirements, and of the install command."""

import json
import sys

import pytest

from lib.env import python_env
from lib.env.python_env import Requirement, RequirementReport, check_requirements, install_command

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
