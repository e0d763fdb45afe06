"""Variables of make that a script does not read."""

import pytest

from gpt2.study.resolve import resolve_config
from lib import make_variables
from lib.commands import COMMANDS, COMMON, VARIABLES, Variable
from lib.config.tree import KconfigTree
from lib.make_variables import (
    EXPORTED,
    GIVEN,
    TARGET,
    require_read,
    require_value,
    resume_command,
    variable_value,
)
from tests.errors import error_of

PLAN, CLEAN = COMMANDS["plan"], COMMANDS["clean"]


@pytest.fixture(autouse=True)
def plan_is_the_target(monkeypatch):
    monkeypatch.setenv(TARGET, "plan")
    # make test FAST=1 passes its own.
    monkeypatch.delenv(GIVEN, raising=False)


def test_every_variable_that_is_not_read_is_reported(monkeypatch):
    monkeypatch.setenv(GIVEN, "STEPS STPE TWICE")
    error = error_of(require_read, PLAN)
    assert error.codes == ["usage.unread-variable"] * 2
    assert [problem.where for problem in error.problems] == ["STPE", "TWICE"]
    assert "make reproduce" in error.problems[1].next
    # Scripts started by a script have other variables; some are read by all.
    monkeypatch.setenv(GIVEN, "STEPS")
    require_read(PLAN)
    require_read(CLEAN)
    monkeypatch.setenv(TARGET, "clean")
    monkeypatch.setenv(GIVEN, " ".join(COMMON))
    require_read(CLEAN)


def test_exported_symbols_and_former_names_have_no_effect():
    exported = ["NSA_USE_FA2", "LEARNING_RATE", "SEED", "PATH", "GPT2_MAX_ITERS"]
    ignored = ["GPT2_MAX_ITERS", "LEARNING_RATE", "NSA_USE_FA2"]
    assert make_variables.variables_without_effect({"LEARNING_RATE", "SEED"}, exported) == ignored
    # Variables of make that are symbols too have an effect.
    names = [name for name in VARIABLES if name.isupper()]
    symbols = resolve_config(KconfigTree(), []).values
    assert {"GPUS", "ON_STALE"} <= symbols.keys() & set(names)
    assert make_variables.variables_without_effect(symbols, names) == []


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
    require_read(PLAN)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.split()[:2] == ["ENV", "SEED=7"]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *(("FAST", text, True) for text in ("1", "Yes", "y")),
        *(("FAST", text, False) for text in ("", "0", "N", "false")),
        ("JOBS", "0", 0),
        ("JOBS", "", None),
        ("SAMPLES", "1", 1),
        ("TOP_P", "1e-1", 0.1),
        ("KEEP_GOING", "n", False),
        ("ON_STALE", "keep", "keep"),
        ("ON_STALE", "", ""),
        ("STEPS", "0", "0"),
    ],
)
def test_a_value_is_of_the_kind_of_its_variable(name, text, value):
    found = variable_value(VARIABLES[name], text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        *(("JOBS", text, "invalid-number") for text in ("-1", "1.5", "x", "１２", "012", "²")),
        ("SAMPLES", "0", "out-of-range"),
        ("TOP_P", "half", "invalid-number"),
        ("FAST", "perhaps", "invalid-value"),
        ("KEEP_GOING", "2", "invalid-value"),
        ("ON_STALE", "maybe", "invalid-value"),
        ("V", "3", "invalid-value"),
    ],
)
def test_an_invalid_value_is_located_at_its_variable(name, text, code):
    (problem,) = error_of(variable_value, VARIABLES[name], text).problems
    assert (problem.code, problem.where) == (f"usage.{code}", name) and repr(text) in problem.what
    assert problem.next


def test_a_missing_value_and_an_option_that_is_no_variable_are_located(monkeypatch):
    rounds = Variable("rounds", "n", "positive", "Rounds")
    assert error_of(variable_value, rounds, "0").problems[0].where == "--rounds"
    assert require_value("x", "SYM", "make why SYM=NAME") == "x"
    (problem,) = error_of(require_value, "", "SYM", "make why SYM=NAME").problems
    assert problem.code == "usage.missing-argument" and "make why SYM=NAME" in problem.next
