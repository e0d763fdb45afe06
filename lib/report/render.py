"""Rendering of any table: aligned text for a terminal, Markdown, CSV, and JSON documents."""

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.files import pretty_json

# "-:" is the shortest column rule that Markdown accepts.
_MIN_RULE_CHARS = 2


@dataclass(frozen=True)
class TableSection:
    """A small table below the main one, as text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    # Whether a terminal shows the section too, with the columns that fit.
    is_short: bool = False


def text_lines(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), min_width: int = 0
) -> list[str]:
    """Return the rows as lines with aligned columns, two blanks apart, without trailing blanks.

    The columns ``right`` are right-aligned; the first column has at least ``min_width`` characters.
    """
    widths = _column_widths(rows)
    widths[:1] = [max(min_width, width) for width in widths[:1]]
    lines = (_aligned(row, widths, set(right)) for row in rows)
    return ["  ".join(cells).rstrip() for cells in lines]


_MIN_TITLE_CHARS = 16


def fitting_columns(
    columns: Mapping[str, Sequence[str]], priority: Sequence[str], width: int | None
) -> list[str]:
    """Return the headings of the columns that fit ``width``, in their order; all without a width.

    ``priority`` lists the headings, the most important first, which is always included.
    """
    chosen: list[str] = []
    for heading in priority:
        needed = max(map(len, [heading, *columns[heading]]))
        if width is None or not chosen or needed <= room_beside(columns, chosen, width):
            chosen.append(heading)
    return [heading for heading in columns if heading in chosen]


def shorten_titles(columns: dict[str, Sequence[str]], beside: Iterable[str], width: int) -> None:
    """Shorten the column ``title``, if there is one, to the room beside the columns ``beside``."""
    if "title" in columns:
        room = max(_MIN_TITLE_CHARS, room_beside(columns, beside, width))
        columns["title"] = shortened(columns["title"], room)


def shortened(texts: Sequence[str], length: int) -> list[str]:
    """Return the texts with at most ``length`` characters each, cut between words if possible."""
    return [t if len(t) <= length else _cut(t, length) for t in texts]


def _cut(text: str, length: int) -> str:
    head = text[: max(0, length - 1)]
    if text[len(head)] != " " and " " in head:
        head = head[: head.rindex(" ")]
    return f"{head.rstrip(' ,')}…"


def room_beside(columns: Mapping[str, Sequence[str]], headings: Iterable[str], width: int) -> int:
    """Return how many characters a further column may have beside the columns ``headings``."""
    return width - sum(max(map(len, [name, *columns[name]])) + 2 for name in headings)


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)
) -> str:
    """Return a Markdown table with aligned columns.

    The columns ``left`` are left-aligned, the others right-aligned; -1 is the last column. A ``|``
    in a cell is escaped, and a line break becomes a blank.
    """
    escaped = [[_markdown_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(_MIN_RULE_CHARS, width) for width in _column_widths(escaped)]
    left_columns = {i % len(widths) for i in left}
    right = set(range(len(widths))) - left_columns
    rule = [("-" * (w - 1) + ":") if i in right else "-" * w for i, w in enumerate(widths)]
    first, *others = [_aligned(row, widths, right) for row in escaped]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (first, rule, *others))


def csv_table(header: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as CSV, with the columns of ``header``; None is an empty field."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def json_document(schema_version: int, fields: Mapping[str, Any]) -> str:
    """Return ``fields`` and the version of their schema as one JSON document with sorted keys."""
    return pretty_json({"schema_version": schema_version, **fields})


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _aligned(row: Sequence[str], widths: Sequence[int], right: set[int]) -> list[str]:
    return [
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
