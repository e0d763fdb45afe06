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
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from lib import _start, console
from lib.commands import COMMANDS, VARIABLES, Command
from lib.errors import EXIT_DONE, ConfigError, Problem
from lib.make_help import help_text
from lib.make_variables import (
    require_read,
    resume_command,
    unknown_names,
    variable_value,
)

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
    """Add ``-O`` and the options of the variables, with their defaults; ``words`` need no option.

    The values are of the variables' kinds: numbers as such, None if absent.
    """
    parser.add_argument(
        "-O", "--build-dir", type=Path, default=Path(), help="folder of .config, data and results"
    )
    for name, default in reads.items():
        variable = VARIABLES[name]
        value, text = default, variable.text
        if name.isupper():
            # An empty variable counts as unset.
            value, text = os.environ.get(name) or default, f"{text} ({name}=)"
        read = partial(variable_value, variable)
        if variable.kind == "flag":
            on = read(value)
            parser.add_argument(variable.option, action="store_true", default=on, help=text)
        elif name in words:
            parser.add_argument(
                variable.key, nargs="?", metavar=name, type=read, default=value, help=text
            )
        else:
            parser.add_argument(
                variable.option, metavar=variable.value, type=read, default=value, help=text
            )


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
    if command is None:
        raise unknown_names("command", [name])
    if command.run == "-":
        what, advice = f"{name}: a target of make alone", f"type: make {name}"
        raise ConfigError(Problem(what, next=advice, code="usage.unknown-command"))
    # The command that resumes an interrupted make.
    resume = resume_command()
    require_read(command)
    description = ""
    # The options are read before the imports of the command, which take longer.
    if {"-h", "--help"} & {*words}:
        from inspect import cleandoc

        description = cleandoc(_function(command).__doc__ or "")
    options = parser_of(command, description).parse_args(words)
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


def main(*arguments: str) -> NoReturn:
    """Run the command that the first argument names, and exit; by default, of this process."""
    name, *words = arguments or sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        console.show(help_text(USAGE))
        sys.exit(EXIT_DONE)
    console.run_main(lambda: call(name, words))


if __name__ == "__main__":
    main()
