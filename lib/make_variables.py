"""Variables of make that a command did not read, or took from the environment.

make exports the names of the variables on its command line, and of those that it found in the
environment. A variable that is set and has no effect would be a wrong experiment without a word.
"""

import os
from collections.abc import Collection
from shlex import quote

from lib.console import log
from lib.errors import ConfigError, Problem, nearest

# Environment variables that the Makefile sets: its target, and names of variables.
TARGET = "KABLATE_TARGET"
GIVEN = "KABLATE_GIVEN"
EXPORTED = "KABLATE_EXPORTED"
# Variables of make itself, of the console, and of every script.
COMMON = {"O", "V", "PYTHON", "EXTRAS", "NO_COLOR", "KCONFIG_CONFIG", "MENUCONFIG_STYLE"}


def resume_command() -> str:
    """Return the command that trains on: make with its variables if the user typed make alone.

    Call it before ``require_read``, which removes the names of the variables.
    """
    typed = os.environ.get(GIVEN, "").split() if os.environ.get(TARGET) == "all" else []
    return " ".join(["make", *(f"{name}={quote(os.environ.get(name, ''))}" for name in typed)])


def require_read(reads: Collection[str], command: str = "") -> None:
    """Raise ConfigError if a variable of make's command line is not among those that a script reads.

    The value of ``V``, which every script reads, must be valid too.
    Logs each variable that the script reads from the environment. A ``command`` other than make's
    target is part of another target, as loading and converting ``.config`` are, and does nothing.
    """
    if (verbosity := os.environ.get("V", "")) not in ("", "0", "1", "2"):
        what = f"invalid value (expected 0, 1 or 2, got {verbosity!r})"
        raise ConfigError(Problem(what, "V", "type: make help", code="usage.invalid-value"))
    if not os.environ.get(TARGET, "").startswith(command):
        return
    # Removed, because they are not about the scripts that this one starts.
    target, given, exported = (os.environ.pop(name, "") for name in (TARGET, GIVEN, EXPORTED))
    unread = [name for name in given.split() if name not in reads and name not in COMMON]
    if unread:
        raise ConfigError(*(_unread(name, target, reads) for name in unread))
    for name in exported.split():
        if name in reads and name not in COMMON:
            log("ENV", f"{name}={os.environ.get(name, '')} (from the environment)")


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


def is_set(variable: str) -> bool:
    """Return whether a variable that is y or n is y. Raises ConfigError for any other value."""
    return is_yes(os.environ.get(variable, ""), variable)


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


def _unread(name: str, target: str, reads: Collection[str]) -> Problem:
    what = f"make {target} does not read this variable{nearest(name, reads)}"
    return Problem(what, name, "type: make help", code="usage.unread-variable")
