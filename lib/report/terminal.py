"""A result table on a terminal: notes first, then one compact table that fits the columns.

The ranking and the speed of a sweep or a matrix follow. The files beside the runs contain every column and section (``table.md``, ``report.html``).
"""

from collections.abc import Sequence

from lib.console import folded
from lib.report.render import TableSection, fitting_columns, shorten_titles, text_lines
from lib.report.table import ResultTable, TableRow
from lib.report.table_text import format_loss, table_label_fields
from lib.report.verdict_text import seeds_note, verdict_cells, verdict_notes
from lib.report.verdicts import ContrastVerdict, VerdictWord
from lib.units import format_difference, format_duration, format_si

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
_COLOURS = {
    VerdictWord.BETTER: "\x1b[32m",
    VerdictWord.WORSE: "\x1b[31m",
    VerdictWord.DIVERGED: "\x1b[31m",
    VerdictWord.UNFAIR: "\x1b[33m",
}
_INDENT = "  "
# The most important column first.
_PRIORITY = (
    *("step", "val loss", "Δ", "verdict", "state", "title", "n", "time", "params", "ppl"),
    *("tokens", "sparsity"),
)


def table_to_terminal(table: ResultTable, width: int, *, colour: bool) -> str:
    """Return notes and table in lines of at most ``width`` characters, without Markdown."""
    notes = [
        *(f"left out: {entry}" for entry in table.left_out),
        *table.notes,
        *verdict_notes(table.verdicts).splitlines(),
        *seeds_note(table.verdicts).splitlines(),
    ]
    if table.unigram_entropy is not None:
        notes.append(f"{table.unigram_entropy:.4f} nats: the loss of token frequencies alone")
    lines = [folded(note, width, _INDENT) for note in notes]
    lines += ["", *_rows(table, width, colour)]
    for section in table.sections:
        if section.is_short:
            lines += ["", section.title, *_section(section, width)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _section(section: TableSection, width: int) -> list[str]:
    columns = dict(zip(section.header, zip(*section.rows, strict=True), strict=True))
    shown = fitting_columns(columns, section.header, width)
    cells = [shown, *zip(*(columns[heading] for heading in shown), strict=True)]
    return text_lines(cells, right=range(1, len(shown)))


def _rows(table: ResultTable, width: int, colour: bool) -> list[str]:
    rows = table.rows
    columns: dict[str, Sequence[str]] = {
        "step": [_name(row) for row in rows],
        **{name: [row.labels.get(name, "") for row in rows] for name in table_label_fields(table)},
        "val loss": [format_loss(row.val_loss).partition(" ")[0] for row in rows],
        "n": [str(row.val_loss.n) if row.val_loss else "-" for row in rows],
        "Δ": [_difference(row) for row in rows],
        "verdict": [_word(row) for row in rows],
        "ppl": ["-" if row.perplexity is None else f"{row.perplexity:.2f}" for row in rows],
        "params": ["-" if row.parameters is None else f"{row.parameters:,}" for row in rows],
        "tokens": ["-" if row.tokens is None else format_si(row.tokens) for row in rows],
        "time": [
            "-" if row.train_seconds is None else format_duration(row.train_seconds) for row in rows
        ],
        "sparsity": [f"{row.sparsity:.1%}" if row.sparsity else "" for row in rows],
        "state": [row.state for row in rows],
        "title": [row.variant.title for row in rows],
    }
    if {*columns["state"]} == {"done"}:
        del columns["state"]
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    labels = table_label_fields(table)
    beside = [*labels, *(name for name in _PRIORITY[:5] if name in columns)]
    shorten_titles(columns, beside, width)
    priority = ["step", *labels, *(name for name in _PRIORITY[1:] if name in columns)]
    headings = fitting_columns(columns, priority, width)
    left = {"step", "verdict", "state", "title", *labels}
    right = [i for i, heading in enumerate(headings) if heading not in left]
    cells = [headings, *zip(*(columns[heading] for heading in headings), strict=True)]
    lines = text_lines(cells, right=right)
    return [
        lines[0],
        *(
            _coloured(*pair, table) if colour else pair[0]
            for pair in zip(lines[1:], rows, strict=True)
        ),
    ]


def _name(row: TableRow) -> str:
    number = "" if row.variant.number is None else f"{row.variant.number} "
    return f"{number}{row.variant.slug}"


def _difference(row: TableRow) -> str:
    """Return the difference to the baseline, with half of its interval if there is a verdict."""
    if verdict := _given(row):
        return verdict_cells(verdict)[0]
    return "-" if row.delta_baseline is None else format_difference(row.delta_baseline.mean)


def _word(row: TableRow) -> str:
    verdict = _given(row)
    return verdict_cells(verdict)[3] if verdict else ""


def _given(row: TableRow) -> ContrastVerdict | None:
    """Return the verdict against the baseline; None if there is none."""
    verdict = row.verdict_baseline
    return verdict if verdict is not None and verdict.is_given else None


def _coloured(line: str, row: TableRow, table: ResultTable) -> str:
    """Return a line with its verdict in colour, bold if it is the step with the lowest loss."""
    verdict = _given(row)
    if verdict and (colour := _COLOURS.get(verdict.word)):
        line = line.replace(_word(row), f"{colour}{_word(row)}{_PLAIN}")
    return (
        f"{_BOLD}{line.replace(_PLAIN, _PLAIN + _BOLD)}{_PLAIN}"
        if row is _best(table.rows)
        else line
    )


def _best(rows: Sequence[TableRow]) -> TableRow | None:
    losses = [
        (row.val_loss.mean, i)
        for i, row in enumerate(rows)
        if row.val_loss and not row.variant.is_aa
    ]
    return rows[min(losses)[1]] if len(losses) > 1 else None
