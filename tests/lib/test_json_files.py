"""The reader of JSON files: damage of any kind is one error that names the file."""

import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from lib.json_files import DamagedRecord, MissingRecord, parse_json_lines, read_json_object, typed
from tests.errors import error_of

DAMAGE = {
    "empty": b"",
    "half": b'{"a": 1',
    "array": b"[]",
    "two-objects": b'{"a": 1} {"b": 2}',
    "number": b"1",
    "not-a-number": b'{"a": NaN}',
    "infinite": b'{"a": 1e999}',
    "not-utf-8": b'{"a": "\xff"}',
    "utf-16": json.dumps({"a": 1}).encode("utf-16-le"),
    "nul": b"\0" * 64,
    "deep": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "long-number": b'{"a": ' + b"9" * 10_000 + b"}",
}


def damage_of(call, *given, **options):
    error = error_of(call, *given, **options)
    assert isinstance(error, DamagedRecord)
    return error


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    error = damage_of(read_json_object, path)
    assert error.file == path and error.codes == ["run.damaged"]
    lines = b'{"a": 1}\n' + content.replace(b"\n", b" ") + b"\n"
    error = damage_of(parse_json_lines, path, lines)
    assert (error.file, error.line) == (path, 2)


def test_a_folder_a_pipe_and_a_huge_file_are_damage_and_nothing_is_missing(tmp_path):
    (tmp_path / "folder").mkdir()
    # Without a writer, opening a pipe would wait forever.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 40)
    errors = [damage_of(read_json_object, tmp_path / name) for name in ("folder", "pipe", "huge")]
    assert errors[2].actual == f"{1 << 40:,} bytes"
    assert isinstance(error_of(read_json_object, tmp_path / "nothing"), MissingRecord)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Sample:
    count: int
    size: float
    colour: Colour
    flag: bool = False


@dataclass(frozen=True)
class Pair:
    """Rows of this type are checked by the types of the rows before them."""

    count: int
    share: float = 0.5


SAMPLE = {"count": 1, "size": 2, "colour": "red"}


@pytest.mark.parametrize(
    "change",
    [
        *({"count": 1.5}, {"count": True}, {"count": "1"}, {"size": None}),
        *({"colour": "green"}, {"colour": ["red"]}, {"flag": 1}),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, change):
    found = typed(Sample, SAMPLE | {"unknown": 1}, tmp_path, ())
    assert found == Sample(1, 2, Colour.RED) and isinstance(found.colour, Colour)
    error = damage_of(typed, Sample, SAMPLE | change, tmp_path, ("part",), 7)
    (name,) = change
    assert f"part.{name}" in error.expected and error.line == 7
    for fields in ([], None, {k: v for k, v in SAMPLE.items() if k != "count"}):
        damage_of(typed, Sample, fields, tmp_path, ())


def test_a_row_after_rows_of_its_types_is_checked_as_the_first_one():
    file, row = Path("rows.jsonl"), {"count": 1, "share": 0.25, "more": None}
    changes = ({"count": True}, {"share": "0.25"}, {"count": None})
    for _ in range(2):
        assert typed(Pair, row, file, ()) == Pair(1, 0.25)
        assert typed(Pair, {"count": 2}, file, ()) == Pair(2)
        for damaged in (*(row | each for each in changes), {"share": 0.25}, ["count"], "count"):
            damage_of(typed, Pair, damaged, file, ())
        assert damage_of(typed, Pair, row, file, (), exact=True).expected == "no field more"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        *((text, 0) for text in ('{"a": 1}\n{"b": [2.5]}\n', ' {"a": 1}\t\r\n{"b": 2}\n')),
        ('{"a": 1}\n{"b": "\u2028"}\n', 0),
        *(('{"a": 1}\n{"b":\n2}\n', 2), ('{"a": 1}\n{"b":\n2}{"c": 3}\n', 2)),
        *(('{"a": 1}{"b": 2}\n', 1), ('{"a": [1\n{"b": 2}]}\n', 1)),
        *(('{"a": 1}\n\n{"b": 2}\n', 2), ('{"a": 1}\n[2]\n', 2)),
    ],
)
def test_every_line_is_one_object_or_the_first_other_one_is_named(content, line):
    path = Path("rows.jsonl")
    if line:
        assert damage_of(parse_json_lines, path, content.encode()).line == line
    else:
        rows = [json.loads(text) for text in content.strip().split("\n")]
        assert parse_json_lines(path, content.encode()) == rows
