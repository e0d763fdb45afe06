"""Rendering of any table: aligned text, Markdown, CSV, LaTeX, and JSON; one escaping for each.

In every rendering, control characters of a text are shown by their codes, and a line break is a blank.
"""

import csv
import io
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.errors import visible
from lib.files import pretty_json

# "-:" is the shortest column rule that Markdown accepts.
_MIN_RULE_CHARS = 2
# Markdown: emphasis, code, links, tags, entities, formulas, cells; then addresses, and marks that
# begin a block.
_MARKDOWN = re.compile(
    r"[\\`*|~$]|\](?=[(\[:])|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    r"|:(?=//)|(?<=www)\.(?=\S)"
)
_MARKDOWN_BLOCK = re.compile(r"^([-+](?=\s)|[#>=]|\[(?=[ xX]\])|\d+(?=[.)]\s))")
# A spreadsheet takes a text that begins with one of these as a formula.
_FORMULA = re.compile(r" *[=+\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?")


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
    """Return the rows as lines with aligned columns, the first of at least ``min_width`` characters."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = _column_widths(rows)
    widths[:1] = [max(min_width, width) for width in widths[:1]]
    lines = (_aligned(row, widths, set(right)) for row in rows)
    return ["  ".join(cells).rstrip() for cells in lines]


_MIN_TITLE_CHARS = 16


def fitting_rows(
    columns: Mapping[str, Sequence[str]], priority: Sequence[str], width: int | None
) -> list[tuple[str, ...]]:
    """Return the columns that fit ``width``, by ``priority``; ``title`` is shortened to it."""
    chosen: dict[str, Sequence[str]] = {}
    room = math.inf if width is None else width
    for heading in priority:
        texts = columns[heading]
        if heading == "title" and width is not None:
            texts = shortened(texts, max(_MIN_TITLE_CHARS, int(room)))
        needed = max(map(len, [heading, *texts]))
        if not chosen or needed <= room:
            chosen[heading] = texts
            room -= needed + 2
    shown = tuple(heading for heading in columns if heading in chosen)
    return [shown, *zip(*(chosen[heading] for heading in shown), strict=True)]


def shortened(texts: Sequence[str], length: int) -> list[str]:
    """Return the texts with at most ``length`` characters each, cut between words if possible."""
    cut = []
    for text in texts:
        head = text[: max(0, length - 1)]
        if len(text) > length and text[len(head)] != " " and " " in head:
            head = head[: head.rindex(" ")]
        cut.append(text if len(text) <= length else f"{head.rstrip(' ,')}…")
    return cut


def markdown_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)
) -> str:
    """Return a Markdown table; the columns ``left`` are left-aligned, the others right-aligned."""
    escaped = [[_markdown_cell(cell) for cell in row] for row in (header, *rows)]
    widths = [max(_MIN_RULE_CHARS, width) for width in _column_widths(escaped)]
    right = set(range(len(widths))) - set(left)
    rule = [("-" * (w - 1) + ":") if i in right else "-" * w for i, w in enumerate(widths)]
    first, *others = [_aligned(row, widths, right) for row in escaped]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (first, rule, *others))


def csv_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return the rows as CSV; a text that a spreadsheet would take as a formula gets an apostrophe."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in (header, *rows):
        cells = [visible(cell) if isinstance(cell, str) else cell for cell in row]
        for i, text in enumerate(row):
            if isinstance(text, str) and _FORMULA.match(text) and not _NUMBER.fullmatch(text):
                cells[i] = f"'{cells[i]}"
        writer.writerow(cells)
    return stream.getvalue()


def markdown_text(text: str) -> str:
    """Return Markdown that shows ``text`` as it is, as a paragraph, an item or a heading."""
    # The backslash is before a mark, and after a number.
    return _MARKDOWN_BLOCK.sub(
        lambda match: f"{match[0]}\\" if match[0].isdigit() else f"\\{match[0]}",
        _markdown_cell(text),
    )


def _markdown_cell(text: str) -> str:
    return _MARKDOWN.sub(lambda match: f"\\{match[0]}", visible(text))


def json_document(schema_version: int, fields: Mapping[str, Any]) -> str:
    return pretty_json({"schema_version": schema_version, **fields})


def _column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _aligned(row: Sequence[str], widths: Sequence[int], right: set[int]) -> list[str]:
    return [
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


# LaTeX.

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\ensuremath{<}",
    ">": r"\ensuremath{>}",
    "|": r"\ensuremath{|}",
    # A quotation mark that LaTeX's old font encoding has too.
    '"': "{''}",
    "'": r"{'}",
    "`": r"{`}",
    "−": r"\ensuremath{-}",
    "±": r"\ensuremath{\pm}",
    "×": r"\ensuremath{\times}",
    "·": r"\ensuremath{\cdot}",
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
    "≈": r"\ensuremath{\approx}",
    "→": r"\ensuremath{\rightarrow}",
    "²": r"\ensuremath{^2}",
    "√": r"\ensuremath{\surd}",
    "Δ": r"\ensuremath{\Delta}",
    "α": r"\ensuremath{\alpha}",
    "β": r"\ensuremath{\beta}",
    "λ": r"\ensuremath{\lambda}",
    "µ": r"\ensuremath{\mu}",
    "μ": r"\ensuremath{\mu}",
}
# What inputenc prints as it is.
_LATIN = "äöüÄÖÜßàáâçèéêëìíîïñòóôùúûÀÁÂÇÈÉÊËÌÍÎÏÑÒÓÔÙÚÛåÅøØæÆ–—“”‘’…"


def latex_text(text: str) -> str:
    """Return ``text`` as LaTeX that prints it; a character without a form in LaTeX as its code."""
    escaped = ""
    for c in visible(text):
        is_plain = (c.isascii() and c not in _LATEX) or c in _LATIN
        escaped += c if is_plain else _LATEX.get(c, rf"\texttt{{U+{ord(c):04X}}}")
    # Two hyphens or commas in a row would print as one other character.
    return re.sub(r"([-,])(?=\1)", r"\1{}", escaped)


def latex_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)
) -> str:
    """Return a tabular of booktabs; the columns ``left`` are left-aligned."""
    align = "".join("l" if i in left else "r" for i in range(len(header)))
    first, *others = (rf"{' & '.join(map(latex_text, row))} \\" for row in (header, *rows))
    lines = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", first, r"\midrule", *others]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"
