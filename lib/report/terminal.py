"""A study on a terminal: one compact table that fits the columns, then what a reader must not miss."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from lib.console import folded, is_ascii_only, painted
from lib.errors import visible
from lib.report.columns import VERDICTS, Row, columns, grid, rows_of
from lib.report.render import fitting_rows, text_lines
from lib.report.text import (
    LINE_WIDTH,
    Document,
    legend,
    loss_note,
    remark_notes,
    seeds_notes,
    verdict_colour,
    warnings,
)
from lib.tracking.watch import ASCII_BLOCKS, BLOCKS, sparkline
from lib.units import format_si

# Codes of a terminal: bold, green, red and yellow.
_BOLD = "1"
_COLOURS = {"better": "32", "worse": "31", "diverged": "31", "unfair": "33"}
_INDENT = "  "
_MAX_NOTES = 4
_CURVE_COLUMNS, _SAMPLE_LINES = 40, 10
# The rounding of a power may not hide a point.
_ABOVE = 1 + 1e-9


def to_terminal(document: Document, width: int) -> str:
    lines = _rows(document, width)
    for section in document["sections"]:
        if section["is_short"]:
            lines += ["", visible(section["title"]), *_section(section, width)]
    notes = [folded(visible(note), width, _INDENT) for note in _notes(document)]
    return "\n".join([*lines, *([""] * bool(notes)), *notes]) + "\n"


def verdicts_to_terminal(document: Document) -> str:
    """Return every comparison with its word, p and reason, and what a reader must not miss."""
    verdicts = [*document["verdicts"], *document["aa_steps"]]
    if not verdicts:
        return ""
    shown, rows = grid(VERDICTS, verdicts)
    right = [i for i, column in enumerate(shown) if not column.is_left]
    lines = text_lines([[column.heading for column in shown], *rows], right=right)
    notes = [*legend(document), *seeds_notes(document), *warnings(document)]
    notes += remark_notes(verdicts)
    return "\n".join([*lines, "", *(folded(visible(n), LINE_WIDTH, _INDENT) for n in notes)]) + "\n"


def training_text(series: Mapping[str, Any], width: int) -> str:
    """Return the validation losses of a training as a curve, and the first lines of its sample."""
    lines, curve = [], series["evaluation"] or {"at": (), "mean": ()}
    points = [point for point in zip(curve["at"], curve["mean"], strict=True) if point[0] > 0]
    if len(points) > 1:
        (first, high), (last, low) = points[0], points[-1]
        head, tail = f"val loss {high:.4f} ", f" {low:.4f}"
        room = min(_CURVE_COLUMNS, width - len(head + tail))
        shares = [first * (last / first) ** (i / (room - 1)) for i in range(room)]
        tokens = [at for at, _ in points]
        values = [points[max(0, bisect_right(tokens, x * _ABOVE) - 1)][1] for x in shares]
        blocks = ASCII_BLOCKS if is_ascii_only() else BLOCKS
        lines.append(head + sparkline(values, blocks) + tail)
        lines.append(f"{_INDENT}after {format_si(first)} to {format_si(last)} tokens, log scale")
    if series["sample"]:
        text = "\n".join(map(visible, series["sample"]["text"].splitlines()))
        sample = folded(text, width - len(_INDENT)).splitlines()[:_SAMPLE_LINES]
        lines += ["Sample, seed {seed}:".format(**series["sample"])]
        lines += [(_INDENT + line)[:width] for line in sample]
    return "".join(f"{line}\n" for line in lines)


def _notes(document: Document) -> list[str]:
    """Return what changes how the table is read: other notes are in table.md."""
    left_out = [f"left out: {entry}" for entry in document["left_out"]]
    notes = [*_first(left_out), *_first(document["notes"]), *warnings(document)]
    words = [verdict for verdict in document["verdicts"] if verdict["verdict"]]
    unjudged = [v for v in words if v["verdict"] in ("UNFAIR", "DIVERGED")]
    notes += remark_notes([{**verdict, "remarks": (), "excluded": ()} for verdict in unjudged])
    notes += [note for note in remark_notes(words) if note.endswith(" (all)")]
    notes += seeds_notes(document)
    if not words:
        notes.append(loss_note(document))
    if any(verdict["interval_95"] for verdict in words):
        head = next(c.heading for c in columns(document) if c.heading.startswith("Δ "))
        terms = f"{'step' if head == 'Δ baseline' else 'row'} - {head.removeprefix('Δ ')}"
        notes.append(f"Δ: {terms}, {document['unit']}, ± half of its 95 % interval.")
    return list(dict.fromkeys(notes))


def _first(notes: Sequence[str]) -> list[str]:
    more = len(notes) - _MAX_NOTES
    return [*notes[:_MAX_NOTES], *([f"and {more} more notes in table.md"] if more > 0 else [])]


def _section(section: Mapping[str, Sequence[str]], width: int) -> list[str]:
    header, *rows = (
        [visible(cell) for cell in row] for row in (section["header"], *section["rows"])
    )
    texts = dict(zip(header, zip(*rows, strict=True), strict=True))
    lines = fitting_rows(texts, header, width)
    return text_lines(lines, right=range(1, len(lines[0])))


def _rows(document: Document, width: int) -> list[str]:
    rows = rows_of(document)
    shown = {visible(column.heading): column for column in columns(document) if column.rank}
    texts: dict[str, Sequence[str]] = {
        heading: [visible(text(row)) if text else "" for row in rows]
        for heading, text in ((h, column.short or column.text) for h, column in shown.items())
    }
    if {*texts["state"]} == {"done"}:
        del texts["state"]
    texts = {heading: cells for heading, cells in texts.items() if {*cells} - {"", "-"}}
    lines = fitting_rows(texts, sorted(texts, key=lambda heading: shown[heading].rank), width)
    right = [i for i, heading in enumerate(lines[0]) if not shown[heading].is_left]
    head, *lines_of_rows = text_lines(lines, right=right)
    words, best = texts.get("verdict", [""] * len(rows)), _best(rows)
    return [
        head,
        *(_coloured(*each, best) for each in zip(lines_of_rows, rows, words, strict=True)),
    ]


def _coloured(line: str, row: Row, word: str, best: Row | None) -> str:
    """Return a line with its verdict in colour, bold if it is the step with the lowest loss."""
    colour, bold = word and _COLOURS.get(verdict_colour(row["verdict"])), [_BOLD] * (row is best)
    before, shown, after = line.partition(word) if colour else (line, "", "")
    codes = [*bold, colour] if colour else bold
    return painted(before, *bold) + painted(shown, *codes) + painted(after, *bold)


def _best(rows: Sequence[Row]) -> Row | None:
    losses = [
        (row["val_loss"], i)
        for i, row in enumerate(rows)
        if row["val_loss"] is not None and row["control"] != "a/a"
    ]
    return rows[min(losses)[1]] if len(losses) > 1 else None
