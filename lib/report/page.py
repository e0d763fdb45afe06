"""The report of a study as one web page, rendered from its document and its series.

The page computes nothing: it formats, counts and arranges the values of the document. Every text is
escaped by the templates, so that values of a run directory cannot become markup, and the content
security policy allows no request and no script except that of the page. The same document gives the
same bytes.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lib.config.layers import to_kconfig_text
from lib.files import write_atomic
from lib.plan.designs import ON
from lib.report.answer import answer, notices, ranges, rule_sentence, summary
from lib.report.columns import main_effects
from lib.report.contrasts import AA_ROLE
from lib.report.figures import svg_element, without_control_characters
from lib.report.plots import MAX_PANELS, short_name, study_figures, total_flops
from lib.report.run_results import UTILISATION_COLUMNS
from lib.report.text import (
    all_remarks,
    effect_notes,
    legend,
    p_cell,
    p_sentence,
    verdict_colour,
    verdict_word,
)
from lib.units import format_duration, format_si, signed

REPORT_FILE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"
_SHOWN_DOCUMENTS = 5
_DIGEST_CHARS = 8
# Arms of a comparison above which their losses are not listed.
_MAX_ARMS = 8
_FIGURE_GROUPS = ("forest", "curves", "panels", "cost", "documents", "statistics")

Values = Mapping[str, Any]
# What a cell of the template ``cells`` shows: text, value, class and runs.
Cell = dict[str, Any]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = {"signed": signed, "condition": _condition, "label": short_name}
    filters |= {"word": verdict_word, "colour": verdict_colour, "setting": to_kconfig_text}
    environment.filters |= filters
    environment.globals["ON"] = ON
    return environment


def render_page(template: str, **values: Any) -> str:
    """Return the page of a template, with style and script."""
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _environment().get_template(template).render(script_digest=digest, **values)
    return without_control_characters(text) + "\n"


def write_report(document: Values, series: Sequence[Values], folder: Path) -> Path:
    """Write the report into ``folder`` and return its path."""
    path = folder / REPORT_FILE
    write_atomic(path, report_page(document, series))
    return path


def report_page(document: Values, series: Sequence[Values]) -> str:
    """Return the report as one self-contained page."""
    sources = _Sources(document)
    charts = study_figures(document, series)
    figures = {
        group: [
            {"group": group, "title": c.title, "caption": c.caption, "svg": Markup(svg_element(c))}
            for c in charts
            if c.group == group
        ]
        for group in _FIGURE_GROUPS
    }
    compared = sum(bool(each["training_difference"]) for each in series)
    return render_page(
        "report.html.jinja",
        title=document["title"],
        document=document,
        summary=summary(document),
        rule=rule_sentence(document),
        answer=answer(document),
        notices=notices(document),
        verdicts=_verdicts(document, sources),
        results=_results(document, sources),
        figures=figures,
        panels_left_out=f"The first {MAX_PANELS} of {compared} are shown."
        * (compared > MAX_PANELS),
        tree=_tree(document),
        conditions=_conditions(document),
        main_effects=None if document["not_estimable"] is None else main_effects(document),
        layers=_layers(series),
        document_lists=_document_lists(series),
        shown_documents=_SHOWN_DOCUMENTS,
        notes=_notes(document),
        samples=[(each["name"], each["sample"]) for each in series if each["sample"]],
    )


class _Sources:
    """The runs behind numbers, for the parts that open when a number is tapped."""

    def __init__(self, document: Values) -> None:
        self._count = 0
        self._anchors = {run["folder"]: f"run-{i}" for i, run in enumerate(document["runs"])}
        runs = {run["folder"]: run for run in document["runs"]}
        # Row → seed → run.
        self._rows = {
            row["name"]: {runs[name]["seed"]: runs[name] for name in row["runs"] if name in runs}
            for row in document["rows"]
        }

    def of_row(self, row: Values) -> dict[str, Any]:
        """Return the losses of the runs of a row."""
        runs = self._rows[row["name"]].values()
        commits = ", ".join(commit[:12] for commit in row["commits"] if commit)
        lines = [
            self._line(f"seed {run['seed']}:", [(run, run["val_loss"])], f" {run['folder']}")
            for run in runs
        ]
        lines.append({"name": f"commit {commits or 'unknown'}", "runs": [], "more": ""})
        return self._source(row["name"], lines)

    def of_verdict(self, verdict: Values) -> dict[str, Any]:
        """Return the losses on both sides of a comparison, and their differences by seed."""
        seeds = verdict["seeds"]
        lines = []
        for arm, losses in verdict["values"].items():
            by_seed = self._rows.get(arm, {})
            runs = [(by_seed.get(s), loss) for s, loss in zip(seeds, losses, strict=False)]
            lines.append(self._line(f"{arm}:", runs))
        if len(lines) > _MAX_ARMS:
            lines = []
        each = ", ".join(signed(value) for value in verdict["differences"])
        lines.append({"name": f"differences: {each}", "runs": [], "more": ""})
        return self._source(f"{verdict['name']}, seeds {ranges(seeds)}", lines)

    def _line(
        self, name: str, runs: Iterable[tuple[Values | None, float]], more: str = ""
    ) -> dict[str, Any]:
        shown = [
            {
                "text": f"{loss:.4f}",
                "name": run["folder"] if run else "",
                "anchor": self._anchors[run["folder"]] if run else "reproduce",
            }
            for run, loss in runs
        ]
        return {"name": name, "runs": shown, "more": more}

    def _source(self, title: str, lines: Sequence[Values]) -> dict[str, Any]:
        self._count += 1
        return {"id": f"source-{self._count}", "title": title, "lines": lines}


def _cell(
    value: Any = None, form: Callable[[Any], str] | str = "", class_: str = "", runs: Any = None
) -> Cell:
    """Return a cell of the templates; an unknown value is an empty one."""
    shown = form if callable(form) else lambda each: format(each, form)
    text = "" if value is None else shown(value)
    return {"text": text, "value": value, "class": class_, "runs": runs}


def _grid(rows: Sequence[Mapping[str, Cell]], *left: str) -> dict[str, Any]:
    """Return a table without the columns that are empty in every row; ``left`` are those of text."""
    header = [name for name in rows[0] if any(row[name]["text"] for row in rows)]
    right = [i for i, name in enumerate(header) if name not in left]
    return {"header": header, "right": right, "rows": [[row[n] for n in header] for row in rows]}


# Verdicts.


def _verdicts(document: Values, sources: _Sources) -> dict[str, Any]:
    """Return the table of all comparisons; without a word, no table, which would be empty."""
    verdicts = [*document["verdicts"], *document["aa_steps"]]
    if not any(verdict["verdict"] for verdict in verdicts):
        return {"rows": []}
    # Remark → its mark.
    marks: dict[str, str] = {}
    for remark in (remark for verdict in verdicts for remark in _remarks(verdict)):
        marks.setdefault(remark, _mark(len(marks)))
    rows = [
        {
            "step": _cell(verdict["step"], class_="name"),
            "against": _cell(verdict["reference"]),
            "verdict": _cell(verdict, verdict_word, f"word verdict {verdict_colour(verdict)}"),
            "Δ loss": _cell(verdict["difference"], signed, runs=sources.of_verdict(verdict)),
            "95 % interval": _cell(
                verdict["interval_95"], lambda ends: " … ".join(map(signed, ends))
            ),
            "p": {**_cell(verdict["p_of_word"]), "text": p_cell(verdict).strip("-")},
            "n": _cell(verdict["n"]),
            "remark": _cell(" ".join(marks[remark] for remark in _remarks(verdict))),
        }
        for verdict in verdicts
    ]
    remarks = [(mark, remark) for remark, mark in marks.items()]
    grid = _grid(rows, "step", "against", "verdict", "remark")
    return {**grid, "remarks": remarks, "notes": [*legend(document), *effect_notes(document)]}


def _remarks(verdict: Values) -> list[str]:
    """Return reason and remarks, without those that the columns have: seeds to add, and the test."""
    # Of an A/A step that passed, there is no reason.
    counted = verdict["more_seeds"] and verdict["role"] != AA_ROLE
    shown = {verdict["reason"] if counted else "", p_sentence(verdict)}
    remarks = [remark for remark in all_remarks(verdict) if remark not in shown]
    return [*remarks, *(f"not counted: {e}" for e in verdict["excluded"])]


def _mark(number: int) -> str:
    """Return a letter, or two: a, b, …, z, aa, ab."""
    more, last = divmod(number, 26)
    return (_mark(more - 1) if more else "") + chr(ord("a") + last)


# Losses and costs.


def _results(document: Values, sources: _Sources) -> dict[str, Any]:
    """Return the table of losses and costs."""
    verdicts = {verdict["name"]: verdict for verdict in document["verdicts"]}
    rows = [
        {
            "#": _cell(row["number"]),
            "step": _cell(row["name"], class_="name"),
            "seeds": _cell(row["n"] or None),
            "val loss": _cell(row["val_loss"], _loss_with(row), runs=sources.of_row(row)),
            "perplexity": _cell(row["perplexity"], ".2f"),
            "Δ baseline": _change(row, verdicts.get(row["against"]["baseline"])),
            "state": _cell(None if row["state"] == "done" else row["state"]),
            "parameters": _cell(row["parameters"], ",d"),
            "tokens": _cell(row["tokens"], format_si),
            "FLOPs": _cell(total_flops(row), lambda flops: f"{flops:.2e}".replace("e+", "e")),
            "time": _cell(row["train_seconds"], format_duration),
            **{
                heading: _cell(row["machine"].get(name), form)
                for name, (heading, form) in UTILISATION_COLUMNS.items()
            },
            "sparsity": _cell(row["sparsity"] or None, ".1%"),
        }
        for row in document["rows"]
    ]
    return _grid(rows, "step", "Δ baseline", "state")


def _loss_with(row: Values) -> Callable[[float], str]:
    """Return the form of the loss of a row: with its standard deviation, if there is one."""
    deviation = "" if row["val_loss_sd"] is None else f" ± {row['val_loss_sd']:.4f}"
    return lambda loss: f"{loss:.4f}{deviation}"


def _change(row: Values, verdict: Values | None) -> Cell:
    # The cells of a factorial design are not compared, but its effects.
    if row["delta_baseline"] is None or not row["against"]["baseline"]:
        return _cell()
    if verdict is None or verdict["verdict"] in (None, "INCONCLUSIVE"):
        return _cell(row["delta_baseline"], signed, "muted")
    word = verdict_word(verdict)
    class_ = f"word {verdict_colour(verdict)}"
    return _cell(row["delta_baseline"], lambda change: f"{signed(change)} {word}", class_)


# What differed.


def _tree(document: Values) -> dict[str, list[tuple[Values, Values | None]]]:
    """Return the children of each row, with the verdicts on their changes; "" for the roots.

    Empty without parents.
    """
    rows = document["rows"]
    if not any(row["parent"] for row in rows):
        return {}
    by_name = {verdict["name"]: verdict for verdict in document["verdicts"]}
    names = {row["name"] for row in rows}
    children: dict[str, list[tuple[Values, Values | None]]] = {"": []}
    for row in rows:
        parent = row["name"].removesuffix(row["slug"]) + (row["parent"] or "")
        against = row["against"]["parent"] or row["against"]["baseline"]
        is_root = not row["parent"] or parent not in names
        children.setdefault("" if is_root else parent, []).append((row, by_name.get(against)))
    return children


def _conditions(document: Values) -> dict[str, Any]:
    """Return the names of the conditions that differ between rows, and the others as text."""
    conditions = document["conditions"]
    first = conditions[0] if conditions else {}
    names = [name for name in first if name != "name"]
    differing = [name for name in names if any(each[name] != first[name] for each in conditions)]
    equal = [f"{name} {_condition(name, first[name])}" for name in names if name not in differing]
    by_name = {row["name"]: row for row in document["rows"]}
    rows = [(each, by_name[each["name"]]) for each in conditions]
    return {"rows": rows if len(rows) > 1 else [], "differing": differing, "equal": equal}


def _condition(name: str, values: Sequence[Any]) -> str:
    if name == "seeds":
        return ranges(values)
    cut = _DIGEST_CHARS if name in ("data", "documents") else None
    return ", ".join(str(value)[:cut] for value in values)


# Mechanisms, documents, notes.


def _layers(series: Sequence[Values]) -> dict[str, dict[str, Any]]:
    """Return the last value of each statistic by row and layer, with the range of its values."""
    tables: dict[str, dict[str, Any]] = {}
    for each in series:
        for name, layers in each["final_statistics"].items():
            tables.setdefault(name, {"rows": {}})["rows"][each["name"]] = layers
    for table in tables.values():
        values = [v for layers in table["rows"].values() for v in layers if v is not None]
        table["low"], table["high"] = min(values, default=0.0), max(values, default=0.0)
        table["names"] = [f"h.{i}" for i in range(max(map(len, table["rows"].values())))]
    return dict(sorted(tables.items()))


def _document_lists(series: Sequence[Values]) -> dict[str, list[tuple[str, float]]]:
    """Return the documents that each row wins and loses most against the baseline, by a title."""
    lists = {}
    for each in series:
        ordered = sorted(each["documents"], key=lambda pair: (pair[1], pair[0]))
        lower = [pair for pair in ordered if pair[1] < 0]
        higher = [pair for pair in ordered if pair[1] > 0]
        if len(ordered) > 1:
            title = f"{each['name']}: {len(lower)} of {len(ordered)} lower"
            lists[title] = [*lower[:_SHOWN_DOCUMENTS], *higher[-_SHOWN_DOCUMENTS:]]
    return lists


def _notes(document: Values) -> list[str]:
    """Return the notes that the missing runs do not give; the runs of equal texts in one note."""
    reasons = {run["reason"] for run in document["runs"] if run["reason"]}
    runs: dict[str, list[str]] = {}
    for note in document["notes"]:
        name, _, text = note.partition(": ")
        if not any(text.endswith(reason) for reason in reasons):
            runs.setdefault(text, []).append(name)
    return [f"{text}: {', '.join(names)}" if text else names[0] for text, names in runs.items()]
