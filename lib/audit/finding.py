"""Audit findings, and JSON readers as strict as this program's writers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Finding:
    """One mismatch in ``file``, a path relative to the run directory."""

    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, found {self.found}"


def differing(file: str, name: str, expected: Any, found: Any) -> Iterator[Finding]:
    """Yield a finding unless both values are equal in type and value; floats compare bit by bit."""
    if type(expected) is not type(found) or expected != found:
        yield Finding(file, f"{name} {_shown(expected)}", _shown(found))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises ValueError for anything else, NaN and Infinity
    included.
    """
    return _object(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one object per line.

    Raises ValueError with the line number if a line is not an object or the last line is
    incomplete.
    """
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        raise ValueError("the last line is incomplete (no newline at the end)")
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            records.append(_object(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return records


def _object(text: str) -> dict[str, Any]:
    record = json.loads(text, parse_constant=_reject_constant)
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object (got {type(record).__name__})")
    return record


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float | str) else json.dumps(value)
