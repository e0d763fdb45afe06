"""Figures of a study's report: differences with intervals, loss curves, cost, documents, statistics.

Every figure is narrow enough for a column of a paper and for a phone. A verdict is shown by colour,
by marker and by its word; the words are those of the verdicts, and nothing else in a figure claims a
difference. The colours are safe for colour-blind readers (after Okabe and Ito 2008).
"""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from lib.report.contrasts import AA_ROLE
from lib.report.figures import NamedFigure, StudyCanvas
from lib.report.series import (
    RowRuns,
    SeedBand,
    document_differences,
    evaluation_curves,
    evaluation_differences,
    statistics_curves,
    training_curves,
    training_differences,
)
from lib.report.table import ResultTable
from lib.report.verdict_text import verdict_colour, verdict_word
from lib.report.verdicts import ContrastVerdict, VerdictWord
from lib.units import signed

# A figure with more rows is continued in the next one, so that it fits a page.
_MAX_FOREST_ROWS = 40
# Small figures per kind; a large sweep would need minutes and megabytes.
MAX_PANELS = 40
# A difference this many times beyond the median one is cut at the edge of a forest plot.
_CUT = 4.0
_MAX_LABEL_CHARS = 26
# Names in the label of points that overlap.
_MAX_NAMES = 4
# Room for a character of a label, and for a row.
_CHAR_INCHES = 0.072
_ROW_INCHES = 0.21
# Half the length of the tick of a seed, in rows.
_SEED_ROWS = 0.165
_DIFFERENCE_AXIS = "← lower loss · nats per token · higher loss →"
# Curves in one figure above which their bands are faint and their names left out.
_MANY = 6
_LINES = ("-", "--", "-.", ":")
_MARKERS = {
    VerdictWord.BETTER: "v",
    VerdictWord.WORSE: "^",
    VerdictWord.EQUIVALENT: "s",
    VerdictWord.INCONCLUSIVE: "o",
}


def study_figures(
    table: ResultTable, rows: Sequence[RowRuns], flops: Mapping[str, float]
) -> list[NamedFigure]:
    """Return all figures of a study that its results allow, in reading order.

    ``flops`` maps variants to training FLOPs per token. Raises PreflightError if matplotlib is not
    installed.
    """
    with StudyCanvas() as canvas:
        return [
            *_forests(canvas, table, rows),
            *_losses(canvas, rows),
            *_difference_panels(canvas, rows),
            *_costs(canvas, rows, flops),
            *_documents(canvas, rows),
            *_statistics(canvas, rows),
        ]


def role_of(row: RowRuns) -> str:
    """Return the colour of a row: the word against the baseline, or that of the baseline."""
    verdict = row.row.verdict_baseline
    if verdict is None:
        return "ink" if not row.baseline else "muted"
    return verdict_colour(verdict)


def short_name(row: RowRuns) -> str:
    """Return the number and name of a row, for a label."""
    number = row.row.variant.number
    return row.row.name if number is None else f"{number} {row.row.name}"


def _label(text: str) -> str:
    """Return the text, shortened in the middle."""
    if len(text) <= _MAX_LABEL_CHARS:
        return text
    half = (_MAX_LABEL_CHARS - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _label_inches(labels: Sequence[str]) -> float:
    """Return the width of the longest label, with its tick."""
    return 0.15 + _CHAR_INCHES * max(map(len, labels))


# Differences with intervals.


def _forests(canvas: StudyCanvas, table: ResultTable, rows: Sequence[RowRuns]) -> list[NamedFigure]:
    """Return the comparisons by kind: with the baseline, with the parent, effects of a design."""
    names = {row.row.name: short_name(row) for row in rows}
    kinds: dict[str, list[ContrastVerdict]] = {}
    for verdict in (*table.verdicts.verdicts, *table.verdicts.aa_steps):
        role = "baseline" if verdict.contrast.role == AA_ROLE else verdict.contrast.role
        kinds.setdefault(role if role in ("baseline", "parent") else "effects", []).append(verdict)
    figures = []
    for kind, verdicts in kinds.items():
        if not any(verdict.difference is not None for verdict in verdicts):
            continue
        limit = _forest_limit(verdicts)
        chunks = [
            verdicts[i : i + _MAX_FOREST_ROWS] for i in range(0, len(verdicts), _MAX_FOREST_ROWS)
        ]
        for number, chunk in enumerate(chunks, 1):
            part = f"-{number}" if len(chunks) > 1 else ""
            figures.append(_forest(canvas, f"forest-{kind}{part}", kind, chunk, limit, names))
    return figures


_FOREST_TITLES = {
    "baseline": "Difference to the baseline",
    "parent": "Difference to the parent step",
    "effects": "Effects of the design",
}


def _forest(
    canvas: StudyCanvas,
    name: str,
    kind: str,
    verdicts: Sequence[ContrastVerdict],
    limit: float,
    names: Mapping[str, str],
) -> NamedFigure:
    labels = [_label(names.get(v.contrast.step, v.contrast.step)) for v in verdicts]
    words = [_forest_text(verdict) for verdict in verdicts]
    figure, axes = canvas.axes(
        0.75 + _ROW_INCHES * len(verdicts),
        left=_label_inches(labels),
        right=0.1 + _CHAR_INCHES * max(map(len, words)),
        bottom=0.45,
        top=0.28,
    )
    axes.axvline(0, color=canvas.colour("muted"), lw=0.8, zorder=1)
    band = verdicts[0].rule.band
    if band:
        axes.axvspan(-band, band, color=canvas.colour("equivalent"), alpha=0.12, lw=0, zorder=0)
    for y, (verdict, text) in enumerate(zip(verdicts, words, strict=True)):
        _forest_row(canvas, axes, y, verdict, limit)
        axes.annotate(
            text,
            (1.03, y),
            xycoords=("axes fraction", "data"),
            va="center",
            color=canvas.colour(verdict_colour(verdict)),
        )
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlim=(-limit, limit), ylim=(len(verdicts) - 0.4, -0.6))
    axes.set_title(_FOREST_TITLES[kind])
    canvas.few_ticks(axes, _DIFFERENCE_AXIS)
    axes.grid(axis="y", visible=False)
    caption = (
        "Mean over seeds with its 95 % interval; grey ticks are single seeds. The word is corrected "
        f"for all {verdicts[0].planned} comparisons of the study."
    )
    if kind == "parent":
        caption += " Steps whose parent is the baseline are in the figure of the baseline."
    if band:
        caption += f" Shaded: the declared band ±{band:g}."
    if all(verdict.test is None for verdict in verdicts):
        caption = "Mean over seeds; grey ticks are single seeds. No comparison has a verdict."
    return NamedFigure(name, "forest", _FOREST_TITLES[kind], caption, figure)


def _forest_text(verdict: ContrastVerdict) -> str:
    change = "" if verdict.difference is None else signed(verdict.difference)
    return f"{change} {verdict_word(verdict)}".strip() if verdict.is_given else change


def _forest_row(
    canvas: StudyCanvas, axes: Any, y: int, verdict: ContrastVerdict, limit: float
) -> None:
    if verdict.difference is None:
        return
    colour = canvas.colour(verdict_colour(verdict))
    seeds = [d for d in verdict.differences if abs(d) < limit]
    # One path: a marker is an element of the page, and a large study has thousands.
    across = [x for seed in seeds for x in (seed, seed, math.nan)]
    along = [y - _SEED_ROWS, y + _SEED_ROWS, math.nan] * len(seeds)
    style = {"lw": 0.7, "solid_capstyle": "butt", "zorder": 2}
    axes.plot(across, along, color=canvas.colour("seed"), **style)
    if verdict.test is not None:
        low, high = (min(max(x, -limit), limit) for x in verdict.test.interval)
        axes.plot([low, high], [y, y], "-", color=colour, lw=1.4, zorder=3)
    if abs(verdict.difference) > limit:
        marker, at = ("<", -limit) if verdict.difference < 0 else (">", limit)
    else:
        marker, at = _MARKERS.get(verdict.word, "x"), verdict.difference
    filled = verdict_colour(verdict) not in ("muted", "inconclusive")
    face = colour if filled else canvas.colour("page")
    axes.plot([at], [y], marker, color=colour, mfc=face, mew=1, ms=5, zorder=4, clip_on=False)


def _forest_limit(verdicts: Sequence[ContrastVerdict]) -> float:
    """Return the end of the axis: the largest interval, unless it would hide all the others."""
    ends = []
    for verdict in verdicts:
        if verdict.difference is not None:
            interval = verdict.test.interval if verdict.test else (verdict.difference,)
            ends.append(max(map(abs, (*interval, *verdict.differences))))
    typical = median(ends)
    shown = [end for end in ends if end <= _CUT * typical]
    return 1.08 * max(shown or [typical]) or 1e-4


# Curves over training.


def _losses(canvas: StudyCanvas, rows: Sequence[RowRuns]) -> list[NamedFigure]:
    train, evaluations = training_curves(rows), evaluation_curves(rows)
    drawn = [(row, t, e) for row, t, e in zip(rows, train, evaluations, strict=True) if t]
    if not drawn:
        return []
    figure, axes = canvas.axes(2.9, left=0.62, right=0.15, bottom=0.45, top=0.28)
    faint = 0.15 if len(drawn) <= _MANY else 0.05
    named = 1 < len(drawn) <= _MANY
    # The baseline is drawn last, on top.
    lines = {}
    for i, (row, curve, points) in sorted(
        enumerate(drawn), key=lambda each: not each[1][0].baseline
    ):
        colour, width = canvas.colour(role_of(row)), 0.8 if row.baseline else 1.6
        style = _LINES[i % len(_LINES)] if named else "-"
        axes.fill_between(curve.at, curve.low, curve.high, color=colour, alpha=faint, lw=0)
        (lines[i],) = axes.plot(curve.at, curve.mean, style, color=colour, lw=width)
        if points:
            axes.plot(points.at, points.mean, ".", color=colour, ms=4)
    spikes = []
    for row, _, _ in drawn:
        for result in row.results:
            for at, loss in result.curves.spikes:
                axes.plot([at], [loss], "x", color=canvas.colour(role_of(row)), ms=5)
                spikes.append(loss)
    later = spikes + [
        value
        for _, curve, _ in drawn
        for at, *values in zip(curve.at, curve.low, curve.high, strict=True)
        for value in values
        if at > 0.2 * curve.at[-1]
    ]
    if later:
        margin = 0.05 * (max(later) - min(later)) or 0.05
        axes.set_ylim(min(later) - margin, max(later) + margin)
    if named:
        names = [short_name(row) for row, _, _ in drawn]
        handles = [lines[i] for i in sorted(lines)]
        axes.legend(handles, names, fontsize=7, frameon=False, loc="upper right")
    axes.set_title("Loss over training")
    axes.set_ylabel("loss (nats per token)")
    canvas.tokens_axis(axes)
    caption = (
        "Lines: training loss, mean and range over seeds; dots: validation loss. Colours are those of "
        "the verdicts against the baseline, which is the thick line."
    ) + " Crosses: unstable steps." * bool(spikes)
    return [NamedFigure("losses", "curves", "Loss over training", caption, figure)]


def _difference_panels(canvas: StudyCanvas, rows: Sequence[RowRuns]) -> list[NamedFigure]:
    """Return one small figure per row: its training loss minus the baseline's."""
    bands, dots = training_differences(rows), evaluation_differences(rows)
    drawn = [(row, b, d) for row, b, d in zip(rows, bands, dots, strict=True) if b]
    limit = _panel_limit([band for _, band, _ in drawn])
    figures = []
    for row, band, points in drawn[:MAX_PANELS]:
        colour = canvas.colour(role_of(row))
        figure, axes = canvas.panel()
        axes.axhline(0, color=canvas.colour("ink"), lw=0.8)
        axes.fill_between(band.at, band.low, band.high, color=colour, alpha=0.2, lw=0)
        axes.plot(band.at, band.mean, color=colour, lw=1.2)
        if points:
            axes.plot(points.at, points.mean, "o", color=colour, ms=2.5)
        axes.set_ylim(-limit, limit)
        axes.set_title(_label(short_name(row)))
        canvas.tokens_axis(axes, label="")
        title = f"Loss of {row.row.name} minus the baseline's, over tokens"
        figures.append(
            NamedFigure(f"difference-{_file(row.row.name)}", "panels", title, "", figure)
        )
    return figures


def _panel_limit(bands: Sequence[SeedBand]) -> float:
    """Return the common end of the axes; the start of training may lie outside."""
    ends = []
    for band in bands:
        later = len(band.at) // 5
        values = [abs(x) for x in (*band.low[later:], *band.high[later:])]
        ends.append(max(values or [0.0]))
    return 1.1 * min(max(ends, default=0), _CUT * median(ends or [0])) or 1e-4


# Loss against cost.


def _costs(
    canvas: StudyCanvas, rows: Sequence[RowRuns], flops: Mapping[str, float]
) -> list[NamedFigure]:
    done = [row for row in rows if row.row.val_loss is not None]
    if len(done) < 2:
        return []
    costs: dict[str, tuple[str, list[Any]]] = {
        "parameters": ("parameters", [row.row.parameters for row in done]),
        "flops": (
            "training FLOPs",
            [_total_flops(row, flops.get(row.row.variant.slug)) for row in done],
        ),
        "time": ("training time (s)", [row.row.train_seconds for row in done]),
    }
    return [
        _cost(canvas, name, title, done, values)
        for name, (title, values) in costs.items()
        if all(value is not None for value in values)
    ]


def _total_flops(row: RowRuns, per_token: float | None) -> float | None:
    return None if per_token is None or row.row.tokens is None else per_token * row.row.tokens


def _cost(
    canvas: StudyCanvas, name: str, title: str, rows: Sequence[RowRuns], values: Sequence[Any]
) -> NamedFigure:
    figure, axes = canvas.axes(2.7, left=0.62, right=0.3, bottom=0.45, top=0.28)
    points = []
    for row, value in zip(rows, values, strict=True):
        stat, colour = row.row.val_loss, canvas.colour(role_of(row))
        assert stat is not None
        if stat.sd:
            axes.errorbar(value, stat.mean, stat.sd, color=colour, lw=0.8, zorder=2)
        verdict = row.row.verdict_baseline
        marker = _MARKERS.get(verdict.word, "x") if verdict and verdict.is_given else "o"
        axes.plot([value], [stat.mean], marker, color=colour, ms=4.5, zorder=3)
        number = row.row.variant.number
        points.append((value, stat.mean, str(number) if number is not None else "", colour))
    _spaced_labels(axes, points)
    axes.set_title(f"Loss against {title.removesuffix(' (s)')}")
    axes.set_ylabel("validation loss")
    canvas.amount_axis(axes, title)
    caption = (
        "Mean over seeds ± one standard deviation of the losses, which is not the error of a "
        "difference. Numbers are those of the steps."
    )
    return NamedFigure(f"cost-{name}", "cost", f"Loss against {title}", caption, figure)


def _spaced_labels(axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Draw the labels right of their points; points that overlap have one label above them."""
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    width, step = 0.06 * (right - left), 0.08 * (high - low)
    groups: list[list[tuple[float, float, str, str]]] = []
    for point in sorted(points):
        near = [
            group
            for group in groups
            if abs(point[0] - group[-1][0]) < width and abs(point[1] - group[0][1]) < step
        ]
        if near:
            near[0].append(point)
        else:
            groups.append([point])
    for group in groups:
        x, y, _, colour = group[-1]
        names = sorted((text for *_, text, _ in group if text), key=lambda text: (len(text), text))
        shown = " ".join(names[:_MAX_NAMES]) + f" +{len(names) - _MAX_NAMES}" * (
            len(names) > _MAX_NAMES
        )
        above = len(group) > 1
        at = (group[0][0], y + 0.4 * step) if above else (x + 0.3 * width, y)
        align = "bottom" if above else "center"
        axes.text(*at, shown, color=colour, va=align, fontsize=7.5)
    axes.set(xlim=(left, right + width), ylim=(low, high))


# Documents.


def _documents(canvas: StudyCanvas, rows: Sequence[RowRuns]) -> list[NamedFigure]:
    """Return the spread of each row's differences over the evaluation documents."""
    spreads = [(row, [value for _, value in document_differences(row)]) for row in rows]
    drawn = [(row, values) for row, values in spreads if len(values) > 1][:_MAX_FOREST_ROWS]
    if not drawn:
        return []
    labels = [_label(short_name(row)) for row, _ in drawn]
    figure, axes = canvas.axes(
        0.75 + _ROW_INCHES * len(drawn),
        left=_label_inches(labels),
        right=0.7,
        bottom=0.45,
        top=0.28,
    )
    axes.axvline(0, color=canvas.colour("muted"), lw=0.8)
    for y, (row, values) in enumerate(drawn):
        colour = canvas.colour(role_of(row))
        cuts = quantiles(values, n=20, method="inclusive")
        axes.plot([cuts[0], cuts[-1]], [y, y], "-", color=colour, lw=0.9)
        axes.plot([cuts[4], cuts[14]], [y, y], "-", color=colour, lw=3.5, solid_capstyle="butt")
        axes.plot([cuts[9]], [y], "o", color=colour, mfc=canvas.colour("page"), ms=4.5)
        lower = sum(value < 0 for value in values)
        axes.annotate(
            f"{lower} of {len(values)}",
            (1.03, y),
            xycoords=("axes fraction", "data"),
            va="center",
        )
    axes.set_yticks(range(len(drawn)), labels)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.annotate("lower in", (1.03, 1.02), xycoords="axes fraction", color=canvas.colour("muted"))
    title = "Differences of documents"
    axes.set_title(title)
    canvas.few_ticks(axes, _DIFFERENCE_AXIS)
    axes.grid(axis="y", visible=False)
    caption = (
        "Loss of each evaluation document minus the baseline's, mean over seeds: median, middle half, "
        "and 5 to 95 % of the documents. Documents of one model share its seed: this is no test."
    )
    return [NamedFigure("documents", "documents", title, caption, figure)]


# Statistics of mechanisms.


def _statistics(canvas: StudyCanvas, rows: Sequence[RowRuns]) -> list[NamedFigure]:
    """Return one small figure per statistic: a line per row that has it."""
    curves: dict[str, list[tuple[RowRuns, SeedBand]]] = {}
    for row in rows:
        for name, band in statistics_curves(row).items():
            if len(band.at) > 1:
                curves.setdefault(name, []).append((row, band))
    figures = []
    for name, lines in sorted(curves.items())[:MAX_PANELS]:
        figure, axes = canvas.panel()
        ends = []
        for row, band in lines:
            colour = canvas.colour(role_of(row))
            axes.fill_between(band.at, band.low, band.high, color=colour, alpha=0.15, lw=0)
            axes.plot(band.at, band.mean, color=colour, lw=1)
            number = row.row.variant.number
            ends.append((band.at[-1], band.mean[-1], "" if number is None else str(number), colour))
        if len(lines) > 1:
            _spaced_labels(axes, ends)
        axes.set_title(_label(name))
        axes.set_xlabel("iterations")
        title = f"{name} over iterations: {', '.join(row.row.name for row, _ in lines)}"
        figures.append(NamedFigure(f"statistic-{_file(name)}", "statistics", title, "", figure))
    return figures


def _file(name: str) -> str:
    """Return the name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "run"
