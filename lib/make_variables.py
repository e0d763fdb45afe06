"""Variables of make: their values, and those that a command did not read or took from the environment.

make exports the names of the variables on its command line, and of those that it found in the
environment. A variable that is set and has no effect would be a wrong experiment without a word.
"""

import os
import re
from collections.abc import Collection
from shlex import quote

from lib.commands import COMMON, VARIABLES, Command, Variable, readers
from lib.console import log
from lib.errors import ConfigError, Problem, nearest

# Environment variables that the Makefile sets: its target, and names of variables.
TARGET = "KABLATE_TARGET"
GIVEN = "KABLATE_GIVEN"
EXPORTED = "KABLATE_EXPORTED"
# Commands that are also part of other targets, whose variables are not for them.
_PARTS = ("constants", "defconfig")
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")


def resume_command() -> str:
    """Return the command that trains on: make with its variables if the user typed make alone.

    Call it before ``require_read``, which removes the names of the variables.
    """
    typed = os.environ.get(GIVEN, "").split() if os.environ.get(TARGET) == "all" else []
    return " ".join(["make", *(f"{name}={quote(os.environ.get(name, ''))}" for name in typed)])


def require_read(command: Command) -> None:
    """Raise ConfigError if a variable of make's command line is not among those of the command.

    The value of ``V``, which every command reads, must be valid too. Logs each variable that the
    command reads from the environment.
    """
    variable_value(VARIABLES["V"], os.environ.get("V", ""))
    if command.name in _PARTS and not os.environ.get(TARGET, "").startswith(command.name):
        return
    # Removed, because they are not about the commands that this one starts.
    target, given, exported = (os.environ.pop(name, "") for name in (TARGET, GIVEN, EXPORTED))
    unread = [name for name in given.split() if name not in (*command.reads, *COMMON)]
    if unread:
        raise ConfigError(*(_unread(name, target, command) for name in unread))
    for name in exported.split():
        if name in command.reads and name not in COMMON:
            log("ENV", f"{name}={os.environ.get(name, '')} (from the environment)")


def _unread(name: str, target: str, command: Command) -> Problem:
    what = f"make {target} does not read this variable{nearest(name, command.reads)}"
    advice = f"{name} is read by: make {', '.join(readers(name))}"
    return Problem(what, name, advice, code="usage.unread-variable")


def variable_value(variable: Variable, text: str) -> str | int | float | bool | None:
    """Return the value of a text, by the kind of the variable; None for a number that is not there.

    Raises ConfigError, located at the variable, if it is not of this kind.
    """
    if variable.kind in ("flag", "switch"):
        return is_yes(text, variable.name)
    if variable.choices:
        if text and text not in variable.choices:
            expected = f"expected {', '.join(variable.choices)}"
            raise _invalid(variable, expected, text, "usage.invalid-value")
        return text
    if variable.kind == "text":
        return text
    if not text:
        return None
    if variable.kind == "number":
        try:
            return float(text)
        except ValueError:
            raise _invalid(variable, "expected a number", text, "usage.invalid-number") from None
    least = 1 if variable.kind == "positive" else 0
    if not _WHOLE_NUMBER.fullmatch(text) or int(text) < least:
        code = "usage.out-of-range" if _WHOLE_NUMBER.fullmatch(text) else "usage.invalid-number"
        raise _invalid(variable, f"expected an integer of at least {least}", text, code)
    return int(text)


def _invalid(variable: Variable, expected: str, text: str, code: str) -> ConfigError:
    where = variable.name if variable.name.isupper() else variable.option
    advice = f"{variable.name}={variable.value}  {variable.text} (make help)"
    return ConfigError(
        Problem(f"invalid value ({expected}, got {text!r})", where, advice, code=code)
    )


# Beginnings of the names that the earlier systems read.
_FORMER_PREFIXES = ("GPT2_", "NSA_", "RA_MLA_", "TEST_SPARSITY_")
# Symbols that are variables of make too.
_SYMBOLS_OF_MAKE = {"DRY_RUN", "GPUS", "JOBS", "ON_STALE", "SEED"}


def variables_without_effect(symbols: Collection[str], variables: Collection[str]) -> list[str]:
    """Return the environment variables named like a symbol, or of the earlier systems.

    Nothing reads them: a symbol is set in ``.config`` or by ``SET=``.
    """
    return sorted(
        name
        for name in variables
        if name not in _SYMBOLS_OF_MAKE and (name in symbols or name.startswith(_FORMER_PREFIXES))
    )


_YES, _NO = ("1", "y", "yes", "true"), ("", "0", "n", "no", "false")


def is_yes(text: str, variable: str) -> bool:
    """Return whether the value of ``variable`` is y. Raises ConfigError if it is neither y nor n."""
    if text.lower() in _YES + _NO:
        return text.lower() in _YES
    what = f"invalid value (expected y or n, got {text!r})"
    raise ConfigError(Problem(what, variable, "type: make help", code="usage.invalid-value"))


def require_value(value: str, name: str, example: str) -> str:
    """Return a variable's value. Raises ConfigError with the command ``example`` if it is empty."""
    if not value:
        what = "missing (expected a value)"
        raise ConfigError(Problem(what, name, f"type: {example}", code="usage.missing-argument"))
    return value
