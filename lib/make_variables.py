"""Names and variables of make: their values, and what a command does not read.

make exports the names of the variables on its command line, and of those that it found in the
environment. A variable that is set and has no effect would be a wrong experiment without a word.
"""

import contextlib
import os
import re
from collections.abc import Collection, Sequence
from shlex import quote

from lib.commands import COMMON, TARGETS, VARIABLES, Command, Variable, readers
from lib.console import log
from lib.errors import ConfigError, Problem, nearest
from lib.gone import gone

# Environment variables that the Makefile sets: its target, and names of variables.
TARGET = "KABLATE_TARGET"
GIVEN = "KABLATE_GIVEN"
EXPORTED = "KABLATE_EXPORTED"
# Commands that are also part of other targets, whose variables are not for them.
_PARTS = ("constants", "defconfig")
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")
_YES, _NO = ("1", "y", "yes", "true"), ("", "0", "n", "no", "false")


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
    problems = []
    for name in given.split():
        if name not in (*command.reads, *COMMON):
            what = f"make {target} does not read this variable{nearest(name, command.reads)}"
            advice = f"{name} is read by: make {', '.join(readers(name))}"
            problems.append(Problem(what, name, advice, code="usage.unread-variable"))
    if problems:
        raise ConfigError(*problems)
    for name in exported.split():
        if name in command.reads and name not in COMMON:
            log("ENV", f"{name}={os.environ.get(name, '')} (from the environment)")


def unknown_names(kind: str, names: Sequence[str]) -> ConfigError:
    """Return the error of targets, commands or variables that do not exist, or not any more."""
    known = [name for name in VARIABLES if name.isupper()] if kind == "variable" else TARGETS
    advice = f"type: {'kablate --help' if kind == 'command' else 'make help'}"
    if names[-1].startswith("defconfig"):
        advice = "type: make defconfig-NAME; make list-defconfigs lists the names"
    if kind == "variable":
        symbol = names[-1] if re.fullmatch("[A-Z][A-Z0-9_]*", names[-1]) else "NAME"
        advice += f'; a symbol of .config is set by SET="{symbol}=VALUE"'
    problems = []
    for name in names:
        if answer := gone("variable" if kind == "variable" else "target", name):
            problems.append(Problem(f"{name}: {answer}", code="usage.gone"))
            continue
        what = f"{name}: unknown {kind}{nearest(name, known)}"
        is_last = name == names[-1]
        problems.append(Problem(what, next=advice * is_last, code=f"usage.unknown-{kind}"))
    return ConfigError(*problems)


def variable_value(variable: Variable, text: str) -> str | int | float | bool | None:
    """Return the value of a text, by the kind of the variable; None for a number that is not there.

    Raises ConfigError, located at the variable, if it is not of this kind.
    """
    kind, code = variable.kind, "invalid-value"
    if kind in ("flag", "switch"):
        if text.lower() in _YES + _NO:
            return text.lower() in _YES
        expected = "y or n"
    elif variable.choices:
        if not text or text in variable.choices:
            return text
        expected = ", ".join(variable.choices)
    elif kind == "text":
        return text
    elif not text:
        return None
    elif kind == "number":
        with contextlib.suppress(ValueError):
            return float(text)
        expected, code = "a number", "invalid-number"
    else:
        least, code = int(kind == "positive"), "invalid-number"
        if _WHOLE_NUMBER.fullmatch(text):
            if int(text) >= least:
                return int(text)
            code = "out-of-range"
        expected = f"an integer of at least {least}"
    where = variable.name if variable.name.isupper() else variable.option
    what = f"invalid value (expected {expected}, got {text!r})"
    advice = f"{variable.name}={variable.value}  {variable.text} (make help)"
    raise ConfigError(Problem(what, where, advice, code=f"usage.{code}"))


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


def require_value(value: str, name: str, example: str) -> str:
    """Return a variable's value. Raises ConfigError with the command ``example`` if it is empty."""
    if not value:
        what = "missing (expected a value)"
        raise ConfigError(Problem(what, name, f"type: {example}", code="usage.missing-argument"))
    return value
