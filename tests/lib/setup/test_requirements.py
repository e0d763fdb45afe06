"""Tests of version ranges, pins and extras."""

import pytest

from lib.env.python_env import (
    Requirement,
    default_requirements,
    extra_requirements,
    requirements_digest,
)
from lib.errors import ConfigError
from lib.project import ROOT

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
