"""The options of a command of kablate, parsed as the command line does."""

from argparse import Namespace

from lib.commands import COMMANDS
from lib.kablate import parser_of


def options(command: str, *words: str) -> Namespace:
    """Return the options of a command line, with those of make's variables in the environment."""
    parsed = parser_of(COMMANDS[command]).parse_args(words)
    parsed.command_line = "make"
    return parsed
