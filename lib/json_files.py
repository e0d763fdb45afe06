"""Reader of JSON files from disk: the type of every field is checked, and every error names the file.

A file that does not exist raises MissingRecord. A file that cannot be read or parsed, or whose
fields are missing or of another type, raises DamagedRecord. Imports no torch.
"""

import dataclasses
import json
import math
import operator
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from lib.errors import ConfigError, Problem, visible

T = TypeVar("T")


class RecordError(ConfigError):
    """A record of a run cannot be used: its file, the expected content and the actual content."""

    def __init__(self, file: Path, expected: str, actual: str, line: int = 0) -> None:
        self.file = file
        # Number of the line in a file with one record per line, else 0.
        self.line = line
        self.expected = expected
        self.actual = actual
        where = f"{file}:{line}" if line else str(file)
        # Names of fields and values are those of a file.
        what = visible(f"expected {expected}, got {actual}")
        super().__init__(Problem(what, where, code="run.damaged"))


class MissingRecord(RecordError):
    """The file does not exist."""


class DamagedRecord(RecordError):
    """The file cannot be read or parsed, or a field is missing or has another type."""


# Records are small; a larger file is not one, and would fill the memory.
_MAX_OBJECT_BYTES = 1 << 28


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; NaN and Infinity are damage, since no record has them.

    Raises MissingRecord or DamagedRecord.
    """
    content = read_record(path, "a JSON object", _MAX_OBJECT_BYTES)
    try:
        return _object(content)
    except ValueError as error:
        raise DamagedRecord(path, "a JSON object", str(error)) from None


def parse_json_lines(path: Path, content: bytes, *, growing: bool = True) -> list[dict[str, Any]]:
    """Return the JSON objects of the content of a file with one object per line.

    An incomplete last line is ignored while the file may be ``growing``, else it is damage. Raises
    DamagedRecord, with the number of the line.
    """
    content, newline, incomplete = content.rpartition(b"\n")
    if (incomplete or not newline) and not growing:
        actual = "the last line is incomplete (no newline at the end)"
        raise DamagedRecord(path, "one JSON object per line", actual)
    if not newline:
        return []
    rows = _plain_lines(content)
    if rows is None:
        lines = enumerate(content.split(b"\n"), 1)
        rows = [parse_json_line(path, number, line) for number, line in lines]
    return rows


def _plain_lines(content: bytes) -> list[dict[str, Any]] | None:
    """Return one object per line, in a third of the time of ``parse_json_line``; None if a line is unusual.

    A value that goes over several lines would leave fewer values than lines.
    """
    try:
        text = content.decode("utf-8")
        rows = _DECODER.decode("[" + text.replace("\n", ",") + "]")
    except (ValueError, RecursionError):
        return None
    is_plain = len(rows) == text.count("\n") + 1 and set(map(type, rows)) == {dict}
    return rows if is_plain else None


def parse_json_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the JSON object of line ``number`` of a file. Raises DamagedRecord."""
    try:
        return _object(line)
    except ValueError as error:
        raise DamagedRecord(path, "a JSON object", str(error), number) from None


def read_text(path: Path, max_bytes: int = 0) -> str:
    """Return the UTF-8 text of a regular file. Raises MissingRecord or DamagedRecord."""
    expected = "UTF-8 text"
    content = read_record(path, expected, max_bytes)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedRecord(path, expected, str(error)) from None


def unreadable(path: Path, expected: str, error: OSError) -> RecordError:
    """Return the error of a file that could not be read: missing, or damaged."""
    absent = isinstance(error, FileNotFoundError | NotADirectoryError)
    kind = MissingRecord if absent else DamagedRecord
    return kind(path, expected, error.strerror or str(error))


def read_record(path: Path, expected: str, max_bytes: int = 0) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``, if that is not 0.

    Reading a pipe would wait forever. Raises MissingRecord or DamagedRecord. Plans read ten thousand
    files: the calls of the operating system are twice as fast as a stream.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise DamagedRecord(path, expected, "not a regular file")
            if max_bytes and info.st_size > max_bytes:
                raise DamagedRecord(path, expected, f"{info.st_size:,} bytes")
            content = os.read(descriptor, info.st_size + 1)
            # A file that grows, or one beyond the limit of a single read.
            while len(content) != info.st_size and (piece := os.read(descriptor, 1 << 20)):
                content += piece
            return content
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable(path, expected, error) from None


def _object(content: bytes) -> dict[str, Any]:
    # Decoded here, because json detects UTF-16 and UTF-32 in bytes.
    text = content.decode("utf-8").strip(_SPACE)
    try:
        # A fifth faster than decode() for a line of metrics.
        record, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if end != len(text):
        raise ValueError(f"more than one value (the second at character {end})")
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object (got {type(record).__name__})")
    return record


def _finite(text: str) -> float:
    """Return the number; JSON has no infinity, but 1e999 reads as one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is out of range")
    return number


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


_SPACE = " \t\n\r"
_DECODER = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_finite)


def typed(
    kind: type[T],
    fields: Any,
    file: Path,
    place: Sequence[str],
    line: int = 0,
    *,
    exact: bool = False,
) -> T:
    """Return the JSON object ``fields`` as the dataclass ``kind``; further fields are ignored.

    ``place`` is the key path of the object in ``file``. If ``exact``, fields with a default are
    required too, and further fields are damage. Raises DamagedRecord if a field is missing or of
    another type.
    """
    if kind not in _forms:
        _forms[kind] = _form(kind)
    names, ordered, accepted = _forms[kind]
    # Most rows of a file have the types of a row before them.
    if ordered and not exact:
        try:
            row = ordered(fields)
            if tuple(map(type, row)) in accepted:
                return kind(*row)
        except (KeyError, TypeError):
            pass
    # A dictionary by its type: isinstance of an abstract class takes as long as a field.
    if type(fields) is not dict and not isinstance(fields, Mapping):
        name = f"{'.'.join(place)}: " if place else ""
        raise DamagedRecord(file, f"{name}a JSON object", repr(fields)[:60], line)
    values = {}
    for name, types, states, required in names:
        value = fields.get(name, _ABSENT)
        # Not isinstance: True and False are integers in Python, but not in JSON.
        if type(value) in types and (states is None or value in list(states)):
            values[name] = states(value) if states else value
        elif value is not _ABSENT:
            allowed = states or ("null" if t is NoneType else t.__name__ for t in types)
            expected = f"{'.'.join((*place, name))} of type {' or '.join(allowed)}"
            raise DamagedRecord(file, expected, repr(value)[:60], line)
        elif required or exact:
            raise DamagedRecord(file, f"a field {'.'.join((*place, name))}", "none", line)
    if exact and (further := sorted(fields.keys() - values.keys())):
        name = ".".join((*place, further[0][:60]))
        raise DamagedRecord(file, f"no field {name}", "one", line)
    if ordered and len(values) == len(names):
        accepted.add(tuple(map(type, values.values())))
    return kind(**values)


_ABSENT = object()

# Name of a field, the JSON types that it accepts, the names that a text may have (None if any), and
# whether it is required.
_JsonField = tuple[str, tuple[type, ...], type[StrEnum] | None, bool]
# Fields of a dataclass, the function that returns the values of all of them (None if a type does not
# decide whether a value is accepted), and the types of accepted values.
_Form = tuple[Sequence[_JsonField], Callable[[Any], Any] | None, set[tuple[type, ...]]]
# Computed once per dataclass: files may have many rows.
_forms: dict[type[Any], _Form] = {}


def _form(kind: type[Any]) -> _Form:
    hints, names, fields = get_type_hints(kind), list[str](), list[_JsonField]()
    for field in dataclasses.fields(kind):
        hint, required = hints[field.name], field.default is dataclasses.MISSING
        names.append(field.name)
        fields.append((field.name, _json_types(hint), _states(hint), required))
    by_type = len(names) > 1 and all(states is None for _, _, states, _ in fields)
    return fields, operator.itemgetter(*names) if by_type else None, set()


def _states(hint: Any) -> type[StrEnum] | None:
    return hint if isinstance(hint, type) and issubclass(hint, StrEnum) else None


def _json_types(hint: Any) -> tuple[type, ...]:
    """Return the types that JSON gives for an annotated type; every int is a float."""
    if _states(hint):
        return (str,)
    if isinstance(hint, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _json_types(part))
    origin = get_origin(hint) or hint
    if origin is float:
        return (float, int)
    return ({Mapping: dict, Sequence: list}.get(origin, origin),)
