"""The report of a study as one web page: question, findings, figures, tables, provenance.

Verdicts are those of ``StudyVerdicts``; no other part of the page claims a difference. The same
results give the same bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.errors import PreflightError
from lib.files import write_atomic
from lib.report.figures import NamedFigure
from lib.report.html import Cell, Html, details, escape, figure_element, joined, page, table, tag
from lib.report.plots import MAX_PANELS, study_figures
from lib.report.render import TableSection
from lib.report.report_tables import (
    document_sections,
    fairness_table,
    mechanism_sections,
    provenance_table,
    results_table,
    sample_sections,
)
from lib.report.run_results import MissingResult
from lib.report.series import RowRuns, runs_of_rows
from lib.report.study_verdicts import AA_FAILED, StudyVerdicts
from lib.report.table import ResultTable, TableRow, hole_notes, marginal_effects
from lib.report.table_text import EFFECTS_NOTE, effect_rows
from lib.report.verdict_text import (
    all_remarks,
    design_note,
    drift_note,
    format_p,
    noise_note,
    p_equation,
    rule_note,
    seeds_note,
    verdict_colour,
    verdict_word,
)
from lib.report.verdicts import ContrastVerdict, VerdictWord
from lib.units import signed

REPORT_FILE = "report.html"
_DECIDED = (VerdictWord.BETTER, VerdictWord.WORSE, VerdictWord.EQUIVALENT)


@dataclass(frozen=True)
class ReportContext:
    """Contents of a report besides the results: the question, and the commands that repeat the study."""

    # Heading, and sentences about what was trained.
    title: str
    question: Sequence[str]
    # Variant → training FLOPs per token.
    flops: Mapping[str, float]
    # Symbol, value and source of each setting that is not a default.
    settings: Sequence[tuple[str, str, str]]
    # Command and purpose.
    commands: Sequence[tuple[str, str]]
    # Name and state of each folder beside the runs that the report does not include.
    other_folders: Sequence[tuple[str, str]] = ()


def write_report(results: ResultTable, context: ReportContext, folder: Path) -> Path:
    """Write the report into ``folder`` and return its path."""
    path = folder / REPORT_FILE
    write_atomic(path, report_page(results, context))
    return path


def report_page(results: ResultTable, context: ReportContext) -> str:
    """Return the report as one self-contained document.

    Without matplotlib, a note takes the place of the figures.
    """
    rows = runs_of_rows(results)
    try:
        figures, missing = study_figures(results, rows, context.flops), ""
    except PreflightError as error:
        figures, missing = [], "; ".join(f"{p.what}: {p.next}" for p in error.problems)
    shown = _Figures(figures, missing)
    sections = [
        ("Question", _question(results, context)),
        ("Findings", _findings(results)),
        ("Verdicts", _verdicts(results.verdicts, shown)),
        ("Results", results_table(rows, context.flops)),
        ("Training", _training(rows, shown)),
        ("Cost", shown.of("cost")),
        ("Steps", _tree(results.rows)),
        ("Documents", document_sections(rows, shown.of("documents"))),
        ("Mechanisms", mechanism_sections(rows, shown.of("statistics"))),
        ("Combinations", _combinations(results)),
        ("Fairness", fairness_table(rows, context.flops)),
        ("Missing runs and notes", _missing(results, context)),
        ("Samples", sample_sections(rows)),
        ("Provenance", provenance_table(results)),
        ("Reproduce", _reproduce(context)),
    ]
    present = [(title, body) for title, body in sections if body]
    links = joined(tag("a", title, href=f"#{_anchor(title)}") for title, _ in present)
    body = joined(
        tag("section", tag("h2", title), part, id=_anchor(title)) for title, part in present
    )
    heading = tag("h1", context.title), tag("p", _summary(results), class_="sub")
    head = tag("header", *heading, _notice(results), tag("nav", links))
    return page(context.title, tag("main", head, body))


@dataclass(frozen=True)
class _Figures:
    """Drawn figures by kind, or the reason why they are missing."""

    figures: Sequence[NamedFigure]
    missing: str

    def of(self, group: str) -> Html:
        """Return the figures of a kind side by side; empty if there are none."""
        drawn = [figure_element(figure) for figure in self.figures if figure.group == group]
        small = group in ("panels", "statistics")
        return tag("div", *drawn, class_="grid" if small else "pair") if drawn else Html()


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


# Question and findings.


def _notice(results: ResultTable) -> Html:
    """Return the notice that a study has too few seeds for any verdict."""
    text = seeds_note(results.verdicts)
    if not text:
        return Html()
    most = max(verdict.n for verdict in results.verdicts.verdicts)
    heading, explained = "Some comparisons have no verdict yet.", ""
    if most < results.verdicts.plan.rule.min_seeds:
        heading = "One seed gives no verdict." if most <= 1 else "Too few seeds for a verdict."
        explained = "A difference between so few runs is a number, not a result: other seeds can reverse it. "
    return tag(
        "div", tag("strong", heading), tag("p", explained, text), class_="notice", role="note"
    )


def _question(results: ResultTable, context: ReportContext) -> Html:
    study = results.verdicts
    items = [tag("li", sentence) for sentence in context.question]
    if study.verdicts:
        rule = study.plan.rule
        band = f"band ±{rule.band:g} nats" if rule.band else "no band of equivalence declared"
        questions = {
            "both": "each step is compared with the baseline and with its parent",
            "baseline": "each step is compared with the baseline",
            "parent": "each step is compared with its parent",
        }
        compared = questions[study.plan.against]
        if not any(row.variant.parent for row in results.rows):
            compared = "each combination is compared with the first one"
        if study.effects is not None:
            compared = "each effect of the design is compared with 0"
        items.append(
            tag(
                "li",
                f"Rule, declared before the first run: {compared}; variance rule "
                f"{rule.variance}; at most {rule.alpha:g} probability of a false word in the whole "
                f"study of {study.planned} comparisons; {band}; at least {rule.min_seeds} seeds.",
            )
        )
    return tag("ul", *items)


def _findings(results: ResultTable) -> Html:
    study = results.verdicts
    given = [verdict for verdict in study.verdicts if verdict.is_given]
    if not study.verdicts:
        return _single(results)
    if not given:
        return tag("p", "No comparison has a verdict.")
    warnings = [AA_FAILED + ": the study claims differences where none exist."] * study.aa_failed
    warnings += filter(None, [noise_note(study), drift_note(study)])
    counts = [(word, sum(verdict.word is word for verdict in given)) for word in VerdictWord]
    parts = [
        *(tag("p", warning, class_="notice") for warning in warnings),
        tag(
            "ul",
            *(
                tag("li", tag("b", str(count)), tag("span", word.value, class_=_style(word)))
                for word, count in counts
                if count
            ),
            class_="counts",
        ),
    ]
    for word in _DECIDED:
        chosen = [verdict for verdict in given if verdict.word is word]
        if chosen:
            sentences = (tag("li", _sentence(verdict)) for verdict in chosen)
            parts.append(tag("ul", *sentences, class_="wide"))
    rest = [verdict for verdict in given if verdict.word not in _DECIDED]
    for word in dict.fromkeys(verdict.word for verdict in rest):
        names = ", ".join(_versus(verdict) for verdict in rest if verdict.word is word)
        parts.append(tag("p", tag("span", word.value, class_=_style(word)), f": {names}."))
    return joined(parts)


def _single(results: ResultTable) -> Html:
    done = [row for row in results.rows if row.val_loss is not None]
    sentences = [
        tag("li", f"{row.name}: validation loss {row.val_loss.mean:.4f} nats per token")
        for row in done
        if row.val_loss is not None
    ]
    if results.unigram_entropy is not None:
        entropy = f"{results.unigram_entropy:.4f}"
        sentences.append(
            tag("li", f"A model that predicts token frequencies only has the loss {entropy}.")
        )
    return tag("ul", tag("li", "Nothing is compared."), *sentences)


def _sentence(verdict: ContrastVerdict) -> Html:
    word = tag("span", verdict.word.value, class_=_style(verdict.word))
    relation = {"BETTER": " than ", "WORSE": " than ", "EQUIVALENT": " to "}[verdict.word.value]
    text = f": {signed(verdict.difference or 0.0)} nats per token"
    if verdict.test is None:
        text += f", which is rounding, n={verdict.n}."
    else:
        low, high = verdict.test.interval
        text += f" (95 % interval {signed(low)} to {signed(high)}), n={verdict.n}, "
        text += f"{p_equation(verdict.p_of_word)}."
    contrast = verdict.contrast
    if not contrast.reference:
        return joined(["Effect ", tag("b", contrast.step), " ", word, text])
    step, reference = tag("b", contrast.step), tag("b", contrast.reference)
    return joined([step, " is ", word, relation, reference, text])


def _versus(verdict: ContrastVerdict) -> str:
    more = ""
    if verdict.word is VerdictWord.INCONCLUSIVE and verdict.more_seeds:
        more = f" (about {verdict.more_seeds} more seeds)"
    return f"{verdict.contrast.name}{more}"


def _style(word: VerdictWord) -> str:
    return f"word {word.lower()}"


# Verdicts and training.


def _verdicts(study: StudyVerdicts, shown: _Figures) -> Html:
    if not study.verdicts:
        return Html()
    header = ["step", "against", "verdict", "Δ loss", "95 % interval", "n", "p", "remarks"]
    shown_verdicts = [*study.verdicts, *study.aa_steps]
    lines = [_verdict_row(verdict) for verdict in shown_verdicts]
    if not any(verdict.contrast.reference for verdict in shown_verdicts):
        header = ["effect", *header[2:]]
        lines = [[line[0], *line[2:]] for line in lines]
    words = ("step", "effect", "against", "verdict", "remarks")
    grid = table(header, lines, left=[i for i, title in enumerate(header) if title in words])
    note = (
        f"{rule_note(study)} Negative is better. The losses behind a difference are shown when the "
        "pointer rests on it."
    )
    without = tag("p", f"Figures are left out: {shown.missing}.", class_="notice")
    return joined(
        [
            without if shown.missing else "",
            shown.of("forest"),
            grid,
            tag("p", note, class_="note"),
        ]
    )


def _verdict_row(verdict: ContrastVerdict) -> list[Cell | str]:
    difference, interval = "-", "-"
    if verdict.difference is not None:
        difference = signed(verdict.difference)
    if verdict.test is not None:
        low, high = verdict.test.interval
        interval = f"{signed(low)} … {signed(high)}"
    losses = [
        f"{arm}: " + ", ".join(f"{loss:.4f}" for loss in values)
        for arm, values in verdict.values.items()
    ]
    seeds = f"seeds {', '.join(map(str, verdict.seeds))}" if verdict.seeds else ""
    word = verdict_word(verdict)
    remarks = [*all_remarks(verdict), *(f"not counted: {e}" for e in verdict.excluded)]
    return [
        Cell(verdict.contrast.step),
        Cell(verdict.contrast.reference),
        Cell(word, class_=f"word {verdict_colour(verdict)}", word=word),
        Cell(difference, verdict.difference, title="\n".join([seeds, *losses]).strip()),
        Cell(interval),
        Cell(str(verdict.n), verdict.n),
        Cell(format_p(verdict.p_of_word), verdict.p_of_word),
        Cell("; ".join(remarks), class_="wrap muted"),
    ]


def _training(rows: Sequence[RowRuns], shown: _Figures) -> Html:
    panels = shown.of("panels")
    if panels:
        compared = sum(bool(row.pairs) for row in rows)
        note = (
            "Training loss of each step minus the baseline's at the same seed, in nats per token: "
            "mean and range over seeds; dots: validation loss. Below the line is better. These curves "
            "are no verdicts."
        )
        if compared > MAX_PANELS:
            note += f" The first {MAX_PANELS} of {compared} are shown."
        panels = joined([tag("h3", "Difference to the baseline over training"), panels])
        panels = joined([panels, tag("p", note, class_="note")])
    return joined([shown.of("curves"), panels])


def _tree(rows: Sequence[TableRow]) -> Html:
    """Return the steps as a tree of parents and children; empty without parents."""
    if not any(row.variant.parent for row in rows):
        return Html()
    names = {row.name for row in rows}
    children: dict[str, list[TableRow]] = {}
    for row in rows:
        parent = row.name.removesuffix(row.variant.slug) + row.variant.parent
        at_root = not row.variant.parent or parent not in names
        children.setdefault("" if at_root else parent, []).append(row)
    note = "Each step changes the step to which it is attached; the word is that of this change."
    return joined([tag("p", note, class_="note"), _branch(children, "", "tree")])


def _branch(children: Mapping[str, Sequence[TableRow]], name: str, class_: str | None) -> Html:
    items = [
        tag("li", _node(row), _branch(children, row.name, None)) for row in children.get(name, ())
    ]
    return tag("ul", *items, class_=class_) if items else Html()


def _node(row: TableRow) -> Html:
    verdict = row.verdict_parent or row.verdict_baseline
    number = "" if row.variant.number is None else f"{row.variant.number} "
    parts: list[str] = [tag("b", f"{number}{row.name}")]
    if row.variant.title:
        parts.append(tag("span", f" {row.variant.title} ", class_="muted"))
    if row.variant.parent and verdict is not None and verdict.is_given:
        change = "" if verdict.difference is None else f"{signed(verdict.difference)} "
        style = f"word {verdict_colour(verdict)}"
        parts.append(tag("span", f" {change}{verdict_word(verdict)}", class_=style))
    return joined(parts)


# Combinations, missing runs, reproduction.


def _combinations(results: ResultTable) -> Html:
    """Return marginal means, and the sections that the study adds to its table."""
    parts: list[str] = []
    effects, study = marginal_effects(results.rows), results.verdicts
    if effects and study.effects is not None:
        parts += [tag("h3", "Marginal means"), _texts(*effect_rows(effects, study))]
        notes = [EFFECTS_NOTE, *design_note(study).splitlines()]
        parts += [tag("p", note, class_="note") for note in notes]
    elif effects:
        header = ("factor", "level", "cells", "mean val loss", "Δ reference", "pairs")
        lines: list[Sequence[Cell | str]] = []
        for effect in effects:
            change = effect.difference
            lines.append(
                (
                    effect.factor,
                    effect.level,
                    Cell(str(effect.cells), effect.cells),
                    Cell(f"{effect.val_loss:.4f}", effect.val_loss),
                    Cell(signed(change.mean), change.mean) if change else "-",
                    Cell(str(change.n), change.n) if change else "-",
                )
            )
        parts += [tag("h3", "Marginal means"), table(header, lines, left=(0, 1))]
        note = "Δ: mean over pairs of cells that agree in every other factor; not a verdict."
        parts.append(tag("p", note, class_="note"))
    parts += [part for section in results.sections for part in _section(section)]
    return joined(parts)


def _section(section: TableSection) -> Iterator[Html]:
    yield tag("h3", section.title)
    yield table(section.header, section.rows)
    if section.note:
        yield tag("p", section.note, class_="note")


def _missing(results: ResultTable, context: ReportContext) -> Html:
    """Return every run without a result, every note, and every other folder beside the runs."""
    holes = [
        item for part in results.parts for item in part.items if isinstance(item, MissingResult)
    ]
    parts = []
    if holes:
        header = ("run", "folder", "state", "reason")
        grid = _texts(header, [(h.run.label, h.run.path.name, h.state, h.reason) for h in holes])
        parts += [tag("h3", "Runs without a result"), grid]
    if context.other_folders:
        grid = _texts(("folder", "state"), context.other_folders)
        parts += [tag("h3", "Other folders beside the runs"), grid]
    described = hole_notes(holes)
    notes = [note for note in results.notes if note not in described]
    if notes:
        parts += [tag("h3", "Notes"), tag("ul", *(tag("li", note) for note in _grouped(notes)))]
    if results.left_out:
        parts.append(tag("h3", "Combinations that the configuration rules out"))
        parts.append(tag("ul", *(tag("li", entry) for entry in results.left_out)))
    return joined(parts)


def _grouped(notes: Sequence[str]) -> list[str]:
    """Return the notes on single runs, ``run: text``, with the runs of equal texts in one note."""
    runs: dict[str, list[str]] = {}
    for note in notes:
        run, _, text = note.partition(": ")
        runs.setdefault(text, []).append(run)
    return [f"{text}: {', '.join(names)}" if text else names[0] for text, names in runs.items()]


def _texts(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Html:
    """Return a table of text, whose last column may need several lines."""
    wrapped: list[list[Cell | str]]
    wrapped = [[*line[:-1], Cell(line[-1], class_="wrap")] for line in lines]
    return table(header, wrapped, left=range(len(header)))


def _reproduce(context: ReportContext) -> Html:
    commands = joined(
        tag("li", tag("code", command), escape(f"  {purpose}"))
        for command, purpose in context.commands
    )
    parts = [tag("ul", commands)]
    if context.settings:
        grid = _texts(("symbol", "value", "source"), context.settings)
        parts.append(details(f"{len(context.settings)} settings that are not defaults", grid))
    return joined(parts)


def _summary(results: ResultTable) -> str:
    """Return size and content of a study in words: steps, seeds and finished runs."""
    items = [item for part in results.parts for item in part.items]
    seeds = len({item.run.seed for item in items})
    done = len(results.results)
    unit = "variant" if len(results.rows) == 1 else "variants"
    return (
        f"{len(results.rows)} {unit}, {seeds} seed{'s' * (seeds != 1)}, {done} of {len(items)} runs "
        "finished and comparable"
    )
