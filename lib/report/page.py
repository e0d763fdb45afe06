"""The report of a study as one web page, rendered from its document and its series.

The templates escape every text, and the content security policy allows no request and no script
except that of the page.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lib.config.layers import to_kconfig_text
from lib.files import write_atomic
from lib.report.columns import (
    VERDICTS,
    Column,
    columns,
    further_tables,
    grid,
    rows_of,
    verdicts_of,
)
from lib.report.figures import PALETTE, svg_element, without_control_characters
from lib.report.plots import short_name, study_figures
from lib.report.text import (
    answer,
    legend,
    notices,
    ranges,
    remark_notes,
    rule_sentence,
    summary,
    verdict_colour,
    verdict_word,
)
from lib.units import signed

REPORT_FILE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"
_FIGURE_GROUPS = ("forest", "curves")

Values = Mapping[str, Any]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"signed": signed, "label": short_name, "ranges": ranges}
    filters |= {"word": verdict_word, "colour": verdict_colour, "setting": to_kconfig_text}
    filters["svg"] = lambda chart: Markup(svg_element(chart))
    environment.filters |= filters
    environment.globals["palette"] = PALETTE
    return environment


def render_page(template: str, **values: Any) -> str:
    """Return the page of a template, with style and script."""
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    # Of the bytes in the page, or a browser does not run the script.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values |= {"script": Markup(script), "script_digest": digest}
    text = _environment().get_template(template).render(**values)
    return without_control_characters(text) + "\n"


def write_report(document: Values, series: Sequence[Values], folder: Path) -> Path:
    path = folder / REPORT_FILE
    write_atomic(path, report_page(document, series))
    return path


def report_page(document: Values, series: Sequence[Values]) -> str:
    """Return the report as one self-contained page."""
    charts, verdicts = study_figures(document, series), verdicts_of(document)
    rows = rows_of(document)
    runs = {run["folder"]: {**run, "anchor": f"run-{i}"} for i, run in enumerate(document["runs"])}
    return render_page(
        "report.html.jinja",
        title=document["title"],
        document=document,
        summary=summary(document),
        rule=rule_sentence(document),
        answer=answer(document),
        notices=notices(document),
        verdicts=_cells(VERDICTS, verdicts),
        verdict_notes=[*remark_notes(verdicts), *legend(document)],
        results=_cells(columns(document), rows),
        further=[(t, _cells(shown, lines), n) for t, shown, lines, n in further_tables(document)],
        # Row → seed → run.
        runs={
            row["name"]: {runs[name]["seed"]: runs[name] for name in row["runs"]} for row in rows
        },
        figures={group: [c for c in charts if c.group == group] for group in _FIGURE_GROUPS},
        tree=_tree(document),
        samples=[(each["name"], each["sample"]) for each in series if each["sample"]],
    )


def _cells(shown: Sequence[Column], rows: Sequence[Any]) -> dict[str, Any]:
    """Return the columns with a text, and the rows, each with its cells."""
    filled, lines = grid(shown, rows)

    def cell(column: Column, row: Any, text: str) -> dict[str, Any]:
        shown = text if column.is_left else text.replace("-", "−")
        value = row.get(column.csv[0]) if column.csv else None
        return {"text": "" if text == "-" else shown, "value": value, "style": column.style(row)}

    return {
        "header": [column.heading for column in filled],
        "right": [i for i, column in enumerate(filled) if not column.is_left],
        "columns": filled,
        "rows": [
            (row, [cell(column, row, text) for column, text in zip(filled, texts, strict=True)])
            for row, texts in zip(rows, lines, strict=True)
        ],
    }


# What differed.


def _tree(document: Values) -> dict[str, list[tuple[Values, Values | None]]]:
    """Return the children of each row, with the verdicts on their changes; "" for the roots."""
    by_name = {verdict["name"]: verdict for verdict in document["verdicts"]}
    names = {row["name"] for row in document["rows"]}
    children: dict[str, list[tuple[Values, Values | None]]] = {"": []}
    for row in document["rows"]:
        parent = row["name"].removesuffix(row["slug"]) + (row["parent"] or "")
        against = row["against"]["parent"] or row["against"]["baseline"]
        is_root = not row["parent"] or parent not in names
        children.setdefault("" if is_root else parent, []).append((row, by_name.get(against)))
    return children if any(row["parent"] for row in document["rows"]) else {}
