"""Variables of make that a script does not read."""

import pytest

from gpt2.study.resolve import resolve_config
from lib import make_help, make_variables
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.make_variables import EXPORTED, GIVEN, TARGET, require_read, require_value, resume_command
from lib.project import ROOT


@pytest.fixture(autouse=True)
def plan_is_the_target(monkeypatch):
    monkeypatch.setenv(TARGET, "plan")
    # make test FAST=1 passes its own.
    monkeypatch.delenv(GIVEN, raising=False)


def test_every_variable_that_is_not_read_is_reported(monkeypatch):
    monkeypatch.setenv(GIVEN, "STEPS STPE TWICE")
    with pytest.raises(ConfigError) as caught:
        require_read({"STEPS", "SEEDS"})
    assert caught.value.codes == ["usage.unread-variable"] * 2
    assert [problem.where for problem in caught.value.problems] == ["STPE", "TWICE"]


def test_exported_symbols_and_former_names_have_no_effect():
    exported = ["NSA_USE_FA2", "LEARNING_RATE", "SEED", "PATH", "GPT2_MAX_ITERS"]
    symbols = {"LEARNING_RATE", "SEED"}
    ignored = ["GPT2_MAX_ITERS", "LEARNING_RATE", "NSA_USE_FA2"]
    assert make_variables.variables_without_effect(symbols, exported) == ignored


def test_variables_of_make_that_are_symbols_too_have_an_effect():
    names = make_help._settings((ROOT / "Makefile").read_text())
    symbols = resolve_config(KconfigTree(), []).values
    assert {"GPUS", "ON_STALE"} <= symbols.keys() & set(names)
    assert make_variables.variables_without_effect(symbols, names) == []


def test_variables_of_every_script_are_read(monkeypatch):
    monkeypatch.setenv(GIVEN, " ".join(make_variables.COMMON))
    require_read(set())


def test_scripts_started_by_a_script_have_other_variables(monkeypatch):
    monkeypatch.setenv(GIVEN, "STEPS")
    require_read({"STEPS"})
    require_read(set())


def test_the_command_that_resumes_has_the_typed_variables(monkeypatch):
    for name, value in {TARGET: "all", GIVEN: "SEEDS O", "SEEDS": "1-3", "O": "my runs"}.items():
        monkeypatch.setenv(name, value)
    assert resume_command() == "make SEEDS=1-3 O='my runs'"
    monkeypatch.setenv(TARGET, "rerun")
    monkeypatch.setenv(GIVEN, "SEEDS")
    assert resume_command() == "make"


def test_variables_of_the_environment_are_logged_if_they_are_read(monkeypatch, capsys):
    monkeypatch.setenv(EXPORTED, "SEED DATA PYTHON")
    monkeypatch.setenv("SEED", "7")
    require_read({"SEED", "PYTHON"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.split()[:2] == ["ENV", "SEED=7"]


def test_a_flag_is_yes_or_no(monkeypatch):
    values = {"1": True, "Yes": True, "y": True, "": False, "0": False, "N": False, "false": False}
    assert {text: make_variables.is_yes(text, "FAST") for text in values} == values
    monkeypatch.setenv("FAST", "perhaps")
    with pytest.raises(ConfigError) as caught:
        make_variables.is_set("FAST")
    assert caught.value.codes == ["usage.invalid-value"]
    assert caught.value.problems[0].where == "FAST"


def test_a_missing_value_is_an_error():
    assert require_value("x", "SYM", "make why SYM=NAME") == "x"
    with pytest.raises(ConfigError) as caught:
        require_value("", "SYM", "make why SYM=NAME")
    assert caught.value.codes == ["usage.missing-argument"]
    assert "make why SYM=NAME" in caught.value.problems[0].next
