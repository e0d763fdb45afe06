"""Result tables as Markdown, CSV and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib.files import write_atomic
from lib.plan.designs import ON
from lib.report.contrasts import EFFECT
from lib.report.render import TableSection, csv_table, json_document, markdown_table
from lib.report.run_results import UTILISATION_COLUMNS
from lib.report.study import row_figures
from lib.report.study_verdicts import StudyVerdicts
from lib.report.table import MarginalEffect, ResultTable, SampleStats, TableRow, marginal_effects
from lib.report.verdict_record import VERDICTS_FILE, verdicts_record, write_verdicts
from lib.report.verdict_text import seeds_note, verdict_cells, verdicts_text
from lib.units import format_difference, format_duration, format_si

SCHEMA_VERSION = 1
_FIGURES = (
    "number",
    "slug",
    "parent",
    "n",
    "val_loss",
    "val_loss_sd",
    "perplexity",
    "delta_baseline",
    "delta_baseline_sd",
    "baseline_verdict",
    "baseline_low",
    "baseline_high",
    "baseline_p",
    "delta_parent",
    "delta_parent_sd",
    "parent_verdict",
    "parent_low",
    "parent_high",
    "parent_p",
    "comparisons",
    "parameters",
    "tokens",
    "train_seconds",
    "sparsity",
    "state",
)
# Files of a table, beside the runs.
TABLE_FILES = ("table.md", "table.csv", VERDICTS_FILE)
_ORIGINS = ("runs", "run_ids", "configurations", "commits")


def write_table(table: ResultTable, folder: Path) -> list[Path]:
    """Write table.md, table.csv and verdicts.json into ``folder`` and return their paths.

    A table with rows split by labels leaves verdicts.json alone.
    """
    markdown, comma = (folder / name for name in TABLE_FILES[:2])
    write_atomic(markdown, table_to_markdown(table))
    write_atomic(comma, table_to_csv(table))
    if table.verdicts.plan.exploratory:
        return [markdown, comma]
    return [markdown, comma, write_verdicts(table.verdicts, folder)]


def table_to_markdown(table: ResultTable) -> str:
    """Return the table as Markdown: heading, aligned rows, sections and notes."""
    fields = table_label_fields(table)
    text = f"# {table.study}\n\n{_rows_text(table.rows, fields)}\n"
    if table.unigram_entropy is not None:
        text += (
            f"Unigram entropy of the training text: {table.unigram_entropy:.4f} nats per token, the "
            "loss of a\nmodel that predicts token frequencies only.\n"
        )
    text += seeds_note(table.verdicts)
    if fields:
        text += (
            f"Rows also differ in {', '.join(fields)}; only rows with equal values are compared.\n"
        )
    numbers = {row.variant.slug: row.variant.number for row in table.rows}
    text += (
        verdicts_text(table.verdicts, numbers)
        + _marginal_text(marginal_effects(table.rows), table.verdicts)
        + _layer_text(table.rows)
    )
    for section in table.sections:
        grid = markdown_table(section.header, section.rows)
        text += f"\n## {section.title}\n\n{grid}\n{section.note}"
    text += _machine_text(table)
    if table.left_out:
        text += "\n## Left out\n\n" + "".join(f"- {entry}\n" for entry in table.left_out)
    notes = "".join(f"- {note}\n" for note in table.notes)
    return text + (f"\n## Notes\n\n{notes}" if notes else "")


_RANKING_NOTE = (
    "The lowest point is selected by its loss, so a difference from it is no verdict: train both with "
    "seeds\nthat the sweep did not have.\n"
)


def ranking(rows: Sequence[TableRow]) -> TableSection | None:
    """Return the points of a sweep by their loss; None if fewer than two can be compared.

    A point with a diverged seed has no loss. Rows with labels are not comparable.
    """
    losses = [(row.val_loss, row) for row in rows if row.val_loss is not None]
    if len(losses) < 2 or any(row.labels for row in rows):
        return None
    losses.sort(key=lambda pair: pair[0].mean)
    lowest = losses[0][0].mean
    factors = list(dict.fromkeys(name for _, row in losses for name in row.variant.levels or {}))
    lines = []
    for rank, (loss, row) in enumerate(losses, 1):
        levels = row.variant.levels or {}
        difference = format_difference(loss.mean - lowest) if rank > 1 else "lowest"
        values = [levels.get(name, "-") for name in factors]
        lines.append([str(rank), *values, format_loss(loss), difference, row.state])
    header = ["rank", *factors, "val loss", "Δ lowest", "state"]
    return TableSection("Ranking", header, lines, _RANKING_NOTE, is_short=True)


def table_to_csv(table: ResultTable) -> str:
    """Return the table as CSV with one line per row; a missing figure is an empty field.

    The names and digests of the runs of a row are separated by blanks.
    """
    header = [*_FIGURES, *_ORIGINS, *table_label_fields(table)]
    origins = ({name: " ".join(row.origins[name]) for name in _ORIGINS} for row in table.rows)
    figures = (row_figures(row) | dict(row.labels) for row in table.rows)
    return csv_table(header, (f | o for f, o in zip(figures, origins, strict=True)))


def table_to_json(table: ResultTable) -> str:
    """Return the table as one JSON document with sorted keys; a missing figure is null."""
    document = {
        "study": table.study,
        "unigram_entropy": table.unigram_entropy,
        "rows": [
            {
                **row_figures(row),
                **_labels(row),
                **row.origins,
                "sparsity_by_layer": dict(row.sparsity_by_layer),
                "machine": dict(row.machine),
            }
            for row in table.rows
        ],
        "left_out": list(table.left_out),
        "notes": list(table.notes),
        "sections": [
            {
                "title": section.title,
                "rows": [dict(zip(section.header, row, strict=True)) for row in section.rows],
            }
            for section in table.sections
        ],
        "verdicts": verdicts_record(table.verdicts),
        "marginals": [asdict(marginal) for marginal in marginal_effects(table.rows)],
    }
    return json_document(SCHEMA_VERSION, document)


def table_label_fields(table: ResultTable) -> list[str]:
    """Return the label fields of the rows of ``table``; an empty list for a table without labels."""
    return list(dict.fromkeys(name for row in table.rows for name in row.labels))


def _labels(row: TableRow) -> dict[str, Any]:
    return {"labels": dict(row.labels)} if row.labels else {}


def _rows_text(rows: Sequence[TableRow], fields: Sequence[str]) -> str:
    """Return the main table.

    Steps of a study are compared with their parent, combinations of a sweep with the first row.
    """
    steps = any(row.variant.parent for row in rows)
    pruned = any(row.sparsity for row in rows)
    header = ["#", "step" if steps else "run", *fields, "val loss", "ppl"]
    differences = ["Δ baseline", "Δ parent"] if steps else ["Δ first row"] * (len(rows) > 1)
    header += differences
    header += ["params", "tokens", "time"] + ["sparsity"] * pruned + ["state"]
    cells = (_cells(row, len(differences), pruned) for row in rows)
    return markdown_table(header, cells, left=(1, -1))


def _cells(row: TableRow, differences: int, pruned: bool) -> list[str]:
    number = "" if row.variant.number is None else str(row.variant.number)
    cells = [
        number,
        row.variant.slug,
        *row.labels.values(),
        format_loss(row.val_loss),
        "-" if row.perplexity is None else f"{row.perplexity:.2f}",
        *(_change(stat) for stat in _differences(row)[:differences]),
        "-" if row.parameters is None else f"{row.parameters:,}",
        "-" if row.tokens is None else format_si(row.tokens),
        "-" if row.train_seconds is None else format_duration(row.train_seconds),
    ]
    if pruned:
        cells.append(f"{row.sparsity:.1%}" if row.sparsity else "-")
    return [*cells, row.state]


def _layer_text(rows: Sequence[TableRow]) -> str:
    """Return the sparsity of each layer of pruned models; "" without pruned models."""
    pruned = [row for row in rows if row.sparsity]
    layers = list(dict.fromkeys(layer for row in pruned for layer in row.sparsity_by_layer))
    if not layers:
        return ""
    lines = [["run", "all", *layers]]
    for row in pruned:
        shares = [row.sparsity, *(row.sparsity_by_layer.get(layer) for layer in layers)]
        lines.append([row.variant.slug, *("-" if s is None else f"{s:.1%}" for s in shares)])
    return f"\n## Sparsity by layer\n\n{markdown_table(lines[0], lines[1:])}"


def _machine_text(table: ResultTable) -> str:
    """Return speed, memory and utilisation of each row; "" if no run was sampled.

    Columns that a section of single runs already shows are left out.
    """
    section_headings = {heading for part in table.sections for heading in part.header}
    rows, columns = table.rows, [
        name for name in UTILISATION_COLUMNS if UTILISATION_COLUMNS[name][0] not in section_headings
    ]
    shown = [name for name in columns if any(name in row.machine for row in rows)]
    if not set(shown) - {"tokens_per_second"}:
        return ""
    lines = [["run", *(UTILISATION_COLUMNS[name][0] for name in shown)]]
    for row in rows:
        cells = (
            format(row.machine[name], UTILISATION_COLUMNS[name][1]) if name in row.machine else "-"
            for name in shown
        )
        lines.append([row.variant.slug, *cells])
    return f"\n## Machine\n\n{markdown_table(lines[0], lines[1:])}"


def _marginal_text(effects: Sequence[MarginalEffect], study: StudyVerdicts) -> str:
    """Return the marginal means of a sweep's factors; "" for a study of steps."""
    if not effects:
        return ""
    if study.effects is not None:
        return _effects_text(effects, study)
    lines = [["factor", "level", "cells", "mean val loss", "Δ reference", "pairs"]]
    for effect in effects:
        change = "reference" if effect.level == effect.reference else "-"
        pairs = "-" if effect.level == effect.reference else "0"
        if effect.difference is not None:
            sd = effect.difference.sd
            change = format_difference(effect.difference.mean)
            change += "" if sd is None else f" ± {sd:.4f}"
            pairs = str(effect.difference.n)
        lines.append(
            [
                effect.factor,
                effect.level,
                str(effect.cells),
                f"{effect.val_loss:.4f}",
                change,
                pairs,
            ]
        )
    return (
        f"\n## Marginal means\n\n{markdown_table(lines[0], lines[1:], left=(0, 1))}\n"
        "Δ is the mean over pairs of cells that agree in every other factor, without a verdict; the "
        "mean val\nloss is over all cells of the level, paired or not.\n"
    )


def _effects_text(effects: Sequence[MarginalEffect], study: StudyVerdicts) -> str:
    """Return the marginal means of a factorial design, with the verdicts on its main effects."""
    header, lines = effect_rows(effects, study)
    return f"\n## Marginal means\n\n{markdown_table(header, lines, left=(0, 1, 5))}\n{EFFECTS_NOTE}"


EFFECTS_NOTE = (
    "val loss: mean over the cells of the level. Δ: main effect, the loss with the\n"
    "feature minus the loss without it, over all settings of the others.\n"
)


def effect_rows(
    effects: Sequence[MarginalEffect], study: StudyVerdicts
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the marginal means of a factorial design, with its verdicts."""
    header = ["factor", "level", "cells", "val loss", "Δ ± 95 %", "verdict"]
    verdicts = {
        v.contrast.step.rpartition(" ")[2]: v for v in study.verdicts if v.contrast.role == EFFECT
    }
    lines = []
    for effect in effects:
        cells = ["", ""]
        if effect.level == ON:
            verdict = verdicts.get(effect.factor)
            cells = verdict_cells(verdict)[::3] if verdict else ["", "not estimable"]
        mean = f"{effect.val_loss:.4f}"
        lines.append([effect.factor, effect.level, str(effect.cells), mean, *cells])
    return header, lines


def _differences(row: TableRow) -> tuple[SampleStats | None, SampleStats | None]:
    return row.delta_baseline, row.delta_parent


def format_loss(stat: SampleStats | None) -> str:
    """Return mean, standard deviation and number of losses; "-" if there is none."""
    if stat is None:
        return "-"
    return f"{stat.mean:.4f}" + (f" ± {stat.sd:.4f} n={stat.n}" if stat.sd is not None else "")


def _change(difference: SampleStats | None) -> str:
    if difference is None:
        return "-"
    if difference.sd is None:
        return f"{format_difference(difference.mean)} n=1"
    return f"{format_difference(difference.mean)} ± {difference.sd:.4f} n={difference.n}"
