"""The table of commands and variables: every command exists, and every variable is read."""

from importlib import import_module

import pytest

from lib.commands import COMMANDS, COMMON, TARGETS, VARIABLES, readers, variables_of

RUN = [name for name, command in COMMANDS.items() if command.run != "-"]


@pytest.mark.parametrize("name", RUN)
def test_a_command_is_a_documented_function_of_its_options(name):
    module, _, function = COMMANDS[name].run.partition(":")
    assert vars(import_module(module))[function].__doc__.strip()[0].isupper()


def test_every_variable_is_read_and_every_read_variable_exists():
    assert [name for name in VARIABLES if not readers(name) and name not in COMMON] == []
    assert {name for command in COMMANDS.values() for name in command.reads} <= VARIABLES.keys()
    assert "constants" not in TARGETS and len(set(TARGETS)) == len(TARGETS)
    kinds = {v.kind for v in VARIABLES.values() if not v.choices}
    assert kinds == {"text", "count", "positive", "number", "flag", "switch"}


def test_a_cell_lists_variables_with_defaults_and_sets_of_variables():
    of_run = {"JOBS": "", "ON_STALE": "", "KEEP_GOING": "y", "ALLOW_DIRTY": ""}
    assert variables_of("<RUN> @run N=3") == {"RUN": "", **of_run, "N": "3"}
    assert variables_of("-") == {}
