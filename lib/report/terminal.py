"""A study on a terminal: one compact table that fits the columns, then what a reader must not miss.

The ranking and the speed of a sweep or a matrix follow the table. The files beside the runs have
every column, section and note (``table.md``, ``report.html``).
"""

from collections.abc import Mapping, Sequence

from lib.console import folded
from lib.report.columns import Column, Row, columns, rows_of
from lib.report.render import fitting_columns, shorten_titles, text_lines, visible
from lib.report.text import (
    Document,
    given,
    remark_notes,
    seeds_notes,
    unigram_notes,
    verdict_colour,
    warnings,
)

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_COLOURS = {
    "better": "\x1b[32m",
    "worse": "\x1b[31m",
    "diverged": "\x1b[31m",
    "unfair": "\x1b[33m",
}
_INDENT = "  "
_MAX_NOTES = 4


def to_terminal(document: Document, width: int, *, colour: bool) -> str:
    """Return table and notes in lines of at most ``width`` characters, without Markdown."""
    lines = _rows(document, width, colour)
    for section in document["sections"]:
        if section["is_short"]:
            lines += ["", section["title"], *_section(section, width)]
    notes = [folded(visible(note), width, _INDENT) for note in _notes(document)]
    return "\n".join([*lines, *([""] * bool(notes)), *notes]) + "\n"


def _notes(document: Document) -> list[str]:
    """Return what changes how the table is read: other notes are in table.md."""
    left_out = [f"left out: {entry}" for entry in document["left_out"]]
    notes = [*_first(left_out), *_first(document["notes"]), *warnings(document)]
    words = given(document)
    unjudged = [v for v in words if v["verdict"] in ("UNFAIR", "DIVERGED")]
    notes += remark_notes([{**verdict, "remarks": ()} for verdict in unjudged])
    notes += [note for note in remark_notes(words) if note.endswith(" (all)")]
    notes += seeds_notes(document)
    if not words:
        notes += unigram_notes(document)
    if any(verdict["interval_95"] for verdict in words):
        notes.append(f"Δ: step - baseline, {document['unit']}, ± half of its 95 % interval.")
    return list(dict.fromkeys(notes))


def _first(notes: Sequence[str]) -> list[str]:
    more = len(notes) - _MAX_NOTES
    return [*notes[:_MAX_NOTES], *([f"and {more} more notes in table.md"] if more > 0 else [])]


def _section(section: Mapping[str, Sequence[str]], width: int) -> list[str]:
    rows = [[visible(cell) for cell in row] for row in section["rows"]]
    texts = dict(zip(section["header"], zip(*rows, strict=True), strict=True))
    shown = fitting_columns(texts, section["header"], width)
    cells = [shown, *zip(*(texts[heading] for heading in shown), strict=True)]
    return text_lines(cells, right=range(1, len(shown)))


def _rows(document: Document, width: int, colour: bool) -> list[str]:
    rows = rows_of(document)
    shown = {column.heading: column for column in columns(document) if column.rank}
    texts: dict[str, Sequence[str]] = {
        heading: [visible(_short(column, row)) for row in rows] for heading, column in shown.items()
    }
    if {*texts["state"]} == {"done"}:
        del texts["state"]
    texts = {heading: cells for heading, cells in texts.items() if {*cells} - {"", "-"}}
    priority = sorted(texts, key=lambda heading: shown[heading].rank)
    shorten_titles(texts, [h for h in priority if shown[h].rank < shown["title"].rank], width)
    headings = fitting_columns(texts, priority, width)
    right = [i for i, heading in enumerate(headings) if not shown[heading].is_left]
    cells = [headings, *zip(*(texts[heading] for heading in headings), strict=True)]
    head, *lines = text_lines(cells, right=right)
    if colour:
        best, words = _best(rows), texts.get("verdict", [""] * len(rows))
        lines = [_coloured(*each, best) for each in zip(lines, rows, words, strict=True)]
    return [head, *lines]


def _short(column: Column, row: Row) -> str:
    text = column.short or column.text
    return text(row) if text else ""


def _coloured(line: str, row: Row, word: str, best: Row | None) -> str:
    """Return a line with its verdict in colour, bold if it is the step with the lowest loss."""
    colour = word and _COLOURS.get(verdict_colour(row["verdict"]))
    if colour:
        line = line.replace(word, f"{colour}{word}{_PLAIN}")
    return f"{_BOLD}{line.replace(_PLAIN, _PLAIN + _BOLD)}{_PLAIN}" if row is best else line


def _best(rows: Sequence[Row]) -> Row | None:
    losses = [
        (row["val_loss"], i)
        for i, row in enumerate(rows)
        if row["val_loss"] is not None and row["control"] != "a/a"
    ]
    return rows[min(losses)[1]] if len(losses) > 1 else None
