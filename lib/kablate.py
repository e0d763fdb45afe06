"""``kablate COMMAND``: the command line of everything that make runs, after lib/commands.py.

    kablate plan --steps 0-3     the same as make plan STEPS=0-3
    kablate plan --help

An option has the value of make's variable by default. A variable of make's command line that the
command does not read is an error. A command is a function of its options, which returns the text for
stdout, the exit code, or both.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from lib import _start, console
from lib.commands import COMMANDS, TARGETS, VARIABLES, Command, Variable
from lib.errors import EXIT_DONE, ConfigError, Problem, nearest
from lib.gone import gone
from lib.make_help import help_text
from lib.make_variables import is_yes, require_read, resume_command, variable_value

USAGE = "kablate COMMAND does what make COMMAND does; kablate COMMAND --help explains it"


def parser_of(command: Command, description: str = "") -> console.CommandLine:
    """Return a parser of the command's options, whose defaults are the variables of make."""
    parser = console.CommandLine(
        prog=f"kablate {command.name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, command.reads, command.words)
    return parser


def add_options(
    parser: argparse.ArgumentParser, reads: Mapping[str, str], words: Sequence[str] = ()
) -> None:
    """Add ``-O`` and the options of the variables, with their defaults; ``words`` need no option."""
    parser.add_argument(
        "-O", "--build-dir", type=Path, default=Path(), help="folder of .config, data and results"
    )
    for name, default in reads.items():
        _add_option(parser, VARIABLES[name], default, name in words)


def _add_option(
    parser: argparse.ArgumentParser, variable: Variable, default: str, word: bool
) -> None:
    value, text = default, variable.text
    if variable.name.isupper():
        # An empty variable counts as unset.
        value, text = os.environ.get(variable.name) or default, f"{text} ({variable.name}=)"
    if variable.kind == "flag":
        on = is_yes(value, variable.name)
        parser.add_argument(variable.option, action="store_true", default=on, help=text)
    elif word:
        name = variable.name
        parser.add_argument(variable.key, nargs="?", metavar=name, default=value, help=text)
    else:
        parser.add_argument(variable.option, metavar=variable.value, default=value, help=text)


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options with values of their kinds: numbers as such, None if absent.

    Raises ConfigError with every value that is not of its kind.
    """
    problems: list[Problem] = []
    values = vars(options)
    for variable in VARIABLES.values():
        if isinstance(values.get(variable.key), str):
            try:
                values[variable.key] = variable_value(variable, values[variable.key])
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return options


def option_words(name: str, options: argparse.Namespace) -> list[str]:
    """Return the options, as words of the command ``name``."""
    words = []
    for variable in map(VARIABLES.__getitem__, COMMANDS[name].reads):
        value = vars(options).get(variable.key)
        if variable.kind == "switch" and value is not None:
            value = "y" if value else "n"
        if value is True:
            words.append(variable.option)
        # 0 is a value.
        elif value is not None and value is not False and value != "":
            words.append(f"{variable.option}={value}")
    return words


def call(name: str, words: Sequence[str]) -> int:
    """Run a command with the words after its name; return the exit code."""
    command = COMMANDS.get(name)
    if command is None or command.run == "-":
        raise ConfigError(_unknown(name))
    resume = resume_command()
    require_read(command)
    if {"-h", "--help"} & {*words}:
        # Takes as long as all other imports of this module.
        from inspect import cleandoc

        text = cleandoc(_function(command).__doc__ or "")
        parser_of(command, text).parse_args(words)
    # Before the imports, which take longer.
    options = checked(parser_of(command).parse_args(words))
    # The command that resumes an interrupted make.
    options.command_line = resume
    result = _function(command)(options)
    if isinstance(result, int):
        return result
    code, text = result if isinstance(result, tuple) else (EXIT_DONE, result)
    console.show(text)
    return code


def _function(command: Command) -> Callable[[argparse.Namespace], int | str | tuple[int, str]]:
    """Import the function of a command; Ctrl-C exits at once, see lib/_start.py."""
    module, _, name = command.run.partition(":")
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _start.interrupted)
    try:
        return vars(import_module(module))[name]
    finally:
        signal.signal(signal.SIGINT, handler)


def _unknown(name: str) -> Problem:
    if name in COMMANDS:
        what, advice = f"{name}: a target of make alone", f"type: make {name}"
        return Problem(what, next=advice, code="usage.unknown-command")
    if answer := gone("target", name):
        return Problem(f"{name}: {answer}", code="usage.gone")
    what = f"{name}: unknown command{nearest(name, TARGETS)}"
    return Problem(what, next="type: kablate --help", code="usage.unknown-command")


def run(name: str) -> NoReturn:
    """Run a command with the arguments of this process, and exit."""
    console.run_main(lambda: call(name, sys.argv[1:]))


def main() -> NoReturn:
    """Run the command that the first argument names, and exit."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        console.show(help_text(USAGE))
        sys.exit(EXIT_DONE)
    console.run_main(lambda: call(name, words))


if __name__ == "__main__":
    main()
