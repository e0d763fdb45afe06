"""The generated ``config.py``: one ``NAME = literal`` a line, read as data, never imported."""

import ast
from pathlib import Path

from lib.binding import Value
from lib.errors import ConfigError, Problem
from lib.files import write_atomic
from lib.kconfig.layers import Resolution

_HEADER = "# Generated from .config by make; never edited, and read as data, not imported.\n"


def write_constants(resolution: Resolution, path: Path) -> None:
    """Write every value, sorted by name, with its Python type."""
    lines = (f"{name} = {value!r}\n" for name, value in sorted(resolution.values.items()))
    write_atomic(path, _HEADER + "".join(lines))


def read_constants(path: Path) -> dict[str, Value]:
    """The values by name. ConfigError if the file is missing or is not what make writes."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(Problem("has not been generated yet", str(path), "make")) from None
    except UnicodeDecodeError:
        raise _damaged(path, 1) from None
    values: dict[str, Value] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.startswith("#"):
            continue
        name, equals, literal = line.partition(" = ")
        if not equals or not name.isidentifier() or name in values:
            raise _damaged(path, number)
        values[name] = _literal(literal, path, number)
    return values


def _literal(text: str, path: Path, line: int) -> Value:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise _damaged(path, line) from None
    if not isinstance(value, bool | int | str):
        raise _damaged(path, line)
    return value


def _damaged(path: Path, line: int) -> ConfigError:
    where = f"{path}:{line}"
    return ConfigError(Problem("not what make writes here", where, f"rm {path}; make"))
