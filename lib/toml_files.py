"""TOML files that a user writes: a list of entries, with file and line of every problem.

The files are data of strangers: their size is limited, and deep nesting is a syntax error. Imports
no torch.
"""

import itertools
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem, nearest
from lib.files import regular_file

_SYNTAX_LINE = re.compile(r" \(at line ([0-9]+), column [0-9]+\)$")
_MAX_BYTES = 1 << 20
_TYPE_NAMES = {str: "text in quotes", int: "a whole number", bool: "true or false"}


class TomlEntries:
    """Content and problems of a file with one ``[[entry]]`` table for each entry.

    ``area`` is the first part of the problems' codes, ``example`` where the format is documented.
    Raises ConfigError if the file cannot be read or parsed.
    """

    def __init__(
        self,
        path: Path,
        entry: str,
        area: str,
        example: str,
        parse_float: Callable[[str], Any] = float,
    ) -> None:
        self.path, self.area, self._entry = path, area, entry
        self.problems: list[Problem] = []
        self.text = self._read(example)
        self.content = self._parse(example, parse_float)
        self._lines = self.text.splitlines()
        # The first line of each entry, and the line behind its last.
        header = re.compile(rf"[ \t]*\[\[[ \t]*{entry}[ \t]*\]\]")
        starts = [i for i, line in enumerate(self._lines) if header.match(line)]
        self._spans = list(itertools.pairwise([*starts, len(self._lines)]))

    def entries(self) -> list[Mapping[str, Any]] | None:
        """Return the tables of the entries; None, and a problem, if there are other values."""
        entries = self.content.get(self._entry, [])
        if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
            return entries
        self.note(f"{self._entry}: expected [[{self._entry}]] tables", "invalid-value", None)
        return None

    def keys(self, entry: Mapping[str, Any], kinds: Mapping[str, type], index: int | None) -> None:
        """Note unknown keys and wrong types of an entry, or of the file."""
        for key, value in entry.items():
            if key not in kinds:
                expected = f"one of {', '.join(kinds)}{nearest(key, kinds)}"
                self.note(f"{key}: unknown key (expected {expected})", "unknown-key", index, key)
            elif type(value) is not kinds[key]:
                expected = _TYPE_NAMES.get(kinds[key], f"a {kinds[key].__name__}")
                what = f"{key}: invalid {value!r} (expected {expected})"
                self.note(what, "invalid-value", index, key)

    def note(self, what: str, kind: str, index: int | None, key: str = "") -> None:
        """Note a problem of the entry at ``index``, or of the file for None."""
        code = f"{self.area}.{kind}"
        self.problems.append(Problem(what, self.where(index, key), code=code))

    def where(self, index: int | None, key: str = "") -> str:
        """Return file:line of a key of an entry, or of the entry; of the file for None."""
        lines = list(self._candidates(index))
        # A key of an inline table stands behind another one.
        starts = (r"[ \t]*", r".*[\s,{.]") if key else ("",)
        for start in starts:
            pattern = re.compile(rf"{start}{re.escape(key)}[ \t]*[=.]" if key else "")
            for line in lines:
                if pattern.match(self._lines[line]):
                    return f"{self.path}:{line + 1}"
        return self.where(index) if key and index is not None else str(self.path)

    def _candidates(self, index: int | None) -> Iterator[int]:
        if index is None:
            yield from range(self._spans[0][0] if self._spans else len(self._lines))
        elif index < len(self._spans):
            yield from range(*self._spans[index])

    def _read(self, example: str) -> str:
        try:
            with open(self.path, "rb", opener=regular_file) as stream:
                if (size := os.fstat(stream.fileno()).st_size) > _MAX_BYTES:
                    what = f"too large (expected at most {_MAX_BYTES:,} bytes, got {size:,})"
                    raise ConfigError(
                        Problem(what, str(self.path), example, code=f"{self.area}.too-large")
                    )
                return stream.read(_MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            what = f"unreadable {self.area} file: {cause}"
            raise ConfigError(
                Problem(what, str(self.path), example, code=f"{self.area}.unreadable")
            ) from None

    def _parse(self, example: str, parse_float: Callable[[str], Any]) -> dict[str, Any]:
        try:
            return tomllib.loads(self.text, parse_float=parse_float)
        # A number of thousands of digits is a ValueError, and so is a syntax error.
        except (ValueError, RecursionError) as error:
            line = _SYNTAX_LINE.search(str(error))
            where = f"{self.path}:{line[1]}" if line else str(self.path)
            what = _SYNTAX_LINE.sub("", str(error).split(";")[0])
            raise ConfigError(Problem(what, where, example, code=f"{self.area}.syntax")) from None
