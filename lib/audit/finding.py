"""What an audit finds wrong, and JSON as strictly as this program writes it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be in ``file``, a path below the run's directory."""

    file: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, found {self.found}"


def differing(file: str, name: str, expected: Any, found: Any) -> Iterator[Finding]:
    """A finding unless both are equal, to the last bit of a float."""
    if type(expected) is not type(found) or expected != found:
        yield Finding(file, f"{name} {_shown(expected)}", _shown(found))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. ValueError when it is none, or holds a number that JSON has not."""
    return _object(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one a line. ValueError naming the line that is none."""
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        raise ValueError("the last line is torn")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found.append(_object(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return found


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text, parse_constant=_refuse)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, float | str) else json.dumps(value)
