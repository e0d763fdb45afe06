"""Figures of a study: differences with intervals, loss curves, cost.

Every figure is narrow enough for a column of a paper and for a phone. A verdict is shown by colour,
by marker and by its word; the words are those of the document, and nothing else in a figure claims a
difference. The colours are safe for colour-blind readers (after Okabe and Ito 2008).
"""

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lib.report.contrasts import AA_ROLE
from lib.report.figures import LINES, Chart, Scale
from lib.report.options import NATS, UNITS
from lib.report.text import number_text, verdict_colour, verdict_word
from lib.units import format_amount, signed

# A figure with more rows is continued in the next one, so that it fits a page.
_MAX_FOREST_ROWS = 40
# Small figures per kind; the page of a large sweep would have megabytes.
MAX_PANELS = 40
# A difference this many times beyond the median one is cut at the edge of a forest plot.
_CUT = 4.0
_MAX_LABEL_CHARS = 22
# Names in the label of points that overlap.
_MAX_NAMES = 4
# Points: a column of a paper or the width of a phone; a half of it; room for a character and a row.
_WIDTH = 360
_PANEL = (176, 116)
_CHAR, _ROW = 5.6, 15
# Half the length of the tick of a seed.
_SEED_TICK = 2.5
# Curves in one figure above which their bands and names are left out.
_MANY = 6
# Runs do not record the bytes of their training text.
TRAINING_UNIT = UNITS[NATS]
_DASHES = ("", "5 2", "5 2 1 2", "1 2")
_MARKERS = {"BETTER": "down", "WORSE": "up", "EQUIVALENT": "square", "INCONCLUSIVE": "dot"}
_FOREST_TITLES = {
    "baseline": "Difference to the baseline",
    "parent": "Difference to the parent step",
    "effects": "Effects of the design",
}

Values = Mapping[str, Any]


def study_figures(document: Values, series: Sequence[Values]) -> list[Chart]:
    """Return all figures that the results of a study allow, in reading order."""
    verdicts = {v["name"]: v for v in document["verdicts"]}
    rows = [
        {
            **row,
            "label": short_name(row),
            "colour": "muted" if row["parent"] else "ink",
            "word": None,
            **_of_verdict(verdicts.get(row["against"]["baseline"])),
            "series": curves,
        }
        for row, curves in zip(document["rows"], series, strict=True)
    ]
    return [
        *_forests(document, rows),
        *_losses(rows, document["unit"]),
        *_difference_panels(rows),
        *_cost(rows),
    ]


def short_name(row: Values) -> str:
    """Return the number and name of a row."""
    return row["name"] if row["number"] is None else f"{row['number']} {row['name']}"


def total_flops(row: Values) -> float | None:
    """Return the training FLOPs of one run of the row."""
    per_token, tokens = row["flops_per_token"], row["tokens"]
    return None if per_token is None or tokens is None else per_token * tokens


def _of_verdict(verdict: Values | None) -> dict[str, Any]:
    if verdict is None:
        return {}
    return {"colour": verdict_colour(verdict), "word": verdict["verdict"]}


def _label(text: str) -> str:
    """Return the text, shortened in the middle."""
    if len(text) <= _MAX_LABEL_CHARS:
        return text
    half = (_MAX_LABEL_CHARS - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _file(name: str) -> str:
    """Return the name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "run"


# Differences with intervals.


def _forests(document: Values, rows: Sequence[Values]) -> list[Chart]:
    """Return the comparisons by kind: with the baseline, with the parent, effects of a design."""
    names: dict[str, str] = {row["name"]: row["label"] for row in rows}
    kinds: dict[str, list[Values]] = {}
    for verdict in (*document["verdicts"], *document["aa_steps"]):
        role = "baseline" if verdict["role"] == AA_ROLE else verdict["role"]
        kinds.setdefault(role if role in _FOREST_TITLES else "effects", []).append(verdict)
    charts = []
    for kind, verdicts in kinds.items():
        verdicts = [verdict for verdict in verdicts if verdict["difference"] is not None]
        for first in range(0, len(verdicts), _MAX_FOREST_ROWS):
            part = f"-{first // _MAX_FOREST_ROWS + 1}" * (len(verdicts) > _MAX_FOREST_ROWS)
            chunk, limit = verdicts[first : first + _MAX_FOREST_ROWS], _forest_limit(verdicts)
            texts = [
                (
                    names[v["step"]] if v["step"] in names else v["step"],
                    _forest_text(v),
                    verdict_colour(v),
                )
                for v in chunk
            ]
            name = (f"forest-{kind}{part}", "forest", _FOREST_TITLES[kind])
            chart = _rows_chart(name, texts, limit, document["unit"])
            _forest(chart, chunk, limit)
            if kind == "parent":
                chart.caption += (
                    " Steps whose parent is the baseline are in the figure of the baseline."
                )
            charts.append(chart)
    return charts


def _forest(chart: Chart, verdicts: Sequence[Values], limit: float) -> None:
    """Draw the differences of the comparisons, each in a row, and their caption."""
    chart.caption = "Mean over seeds; grey ticks are single seeds. No comparison has a verdict."
    if any(verdict["verdict"] for verdict in verdicts):
        chart.caption = (
            "Mean over seeds with its 95 % interval; grey ticks are single seeds. The word, if there "
            f"is one, is corrected for all {verdicts[0]['planned_comparisons']} comparisons of the "
            "study; a hollow circle is inconclusive."
        )
    if band := verdicts[0]["band"]:
        ends = {"low": [chart.y.low] * 2, "high": [chart.y.high] * 2}
        chart.band({"at": [-band, band], **ends}, "equivalent", 0.12)
        chart.caption += f" Shaded: the declared band ±{band:g}."
    for y, verdict in enumerate(verdicts):
        _forest_row(chart, y, verdict, limit)


def _rows_chart(
    name: tuple[str, str, str],
    rows: Sequence[tuple[str, str, str]],
    limit: float,
    unit: str,
) -> Chart:
    """Return a chart of differences with one row per entry, the first one on top.

    ``name`` is its file name, kind and title. A row has a label, and a text at the right with its
    colour.
    """
    labels = [_label(label) for label, _, _ in rows]
    size = _WIDTH, 62 + _ROW * len(rows)
    room = max(len(text) for _, text, _ in rows)
    margins = 10 + _CHAR * max(map(len, labels)), 10 + _CHAR * room, 24, 38
    chart = Chart(*(*name, size, margins, Scale(-limit, limit)), Scale(len(rows) - 0.4, -0.6))
    chart.x_axis("", _difference_tick)
    scale = f"← lower loss · {unit} · higher loss →"
    chart.text(_WIDTH / 2, size[1] - 6, scale, "muted", anchor="middle")
    chart.line([0, 0], [chart.y.high, chart.y.low], "muted", width=0.8)
    left, right, _, _ = chart.box
    for y, (label, (_, text, colour)) in enumerate(zip(labels, rows, strict=True)):
        at = chart.at(0, y)[1] + 3.5
        chart.text(left - 6, at, label, anchor="end")
        chart.text(right + 6, at, text, colour)
    return chart


def _difference_tick(value: float) -> str:
    return f"{value:+.4g}".replace("-", "−") if value else "0"


def _forest_text(verdict: Values) -> str:
    """Return the difference and its word; an inconclusive one has its marker only."""
    word = "" if verdict["verdict"] in (None, "INCONCLUSIVE") else verdict_word(verdict)
    if verdict["role"] == AA_ROLE:
        word = verdict_word(verdict).removeprefix("A/A step ").strip("-")
    return f"{signed(verdict['difference'])} {word}".strip()


def _forest_row(chart: Chart, y: int, verdict: Values, limit: float) -> None:
    colour, difference = verdict_colour(verdict), verdict["difference"]
    ticks: list[tuple[float, float] | None] = []
    for seed in verdict["differences"]:
        x, at = chart.at(seed, y)
        ticks += [(x, at - _SEED_TICK), (x, at + _SEED_TICK), None]
    chart.path(ticks, LINES, stroke="seed", width=0.8)
    if verdict["interval_95"]:
        ends = [min(max(end, -limit), limit) for end in verdict["interval_95"]]
        chart.line(ends, [y, y], colour, width=1.4)
    hollow = "page" if colour in ("muted", "inconclusive") else ""
    kind = _MARKERS.get(verdict["verdict"] or "INCONCLUSIVE", "cross")
    if abs(difference) > limit:
        kind, difference = ("left", -limit) if difference < 0 else ("right", limit)
    chart.marker(difference, y, kind, colour, fill=hollow)


def _forest_limit(verdicts: Sequence[Values]) -> float:
    """Return the end of the axis: the largest interval, unless few of them would hide all others."""
    ends = [
        max(map(abs, (*(v["interval_95"] or ()), v["difference"], *v["differences"])))
        for v in verdicts
    ]
    typical = median(ends)
    shown = [end for end in ends if end <= _CUT * typical]
    few = len(shown) >= 0.75 * len(ends)
    return 1.08 * max(shown if few else ends) or 1e-4


# Curves over training.


def _losses(rows: Sequence[Values], unit: str) -> list[Chart]:
    """Return the losses over the whole training.

    A validation loss in another unit than the training loss is left out.
    """
    drawn = [row for row in rows if row["series"]["training"]]
    if unit != TRAINING_UNIT:
        drawn = [{**row, "series": {**row["series"], "evaluation": None}} for row in drawn]
    if not drawn:
        return []
    start = min(row["series"]["training"]["at"][0] for row in drawn)
    end = max(row["series"]["training"]["at"][-1] for row in drawn)
    shown = [
        value
        for row in drawn
        for side in ("low", "high")
        for value in row["series"]["training"][side]
    ]
    shown += [loss for row in drawn for _, loss in row["series"]["spikes"]]
    ranges = Scale(start, end, is_log=True), Scale(min(shown), max(shown), is_log=True)
    name = ("losses", "curves", "Loss over training")
    chart = Chart(*name, (_WIDTH, 250), (36, 12, 24, 38), *ranges)
    chart.x_axis("training tokens", format_amount)
    chart.y_axis(_number)
    _loss_curves(chart, drawn)
    few, spikes = len(drawn) <= _MANY, any(row["series"]["spikes"] for row in drawn)
    over = f", mean{' and range' * few} over seeds" if any(row["n"] > 1 for row in drawn) else ""
    chart.caption = (
        f"Training loss{over}, in {TRAINING_UNIT}, on logarithmic axes"
        f"{'; dots: validation loss' * (few and unit == TRAINING_UNIT)}."
    )
    if len(drawn) > 1:
        coloured = any(row["word"] for row in drawn)
        words = "; colours are those of the verdicts against it" * coloured
        chart.caption += f" The thick line is the baseline{words}."
    chart.caption += " Crosses: unstable steps." * spikes
    return [chart]


def _loss_curves(chart: Chart, rows: Sequence[Values]) -> None:
    named = 1 < len(rows) <= _MANY
    # The baseline is drawn last, on top.
    for i, row in reversed([*enumerate(rows)]):
        curve, colour = row["series"]["training"], row["colour"]
        width = 1.8 if not row["parent"] and len(rows) > 1 else 1
        dash = _DASHES[i % len(_DASHES)] if named else ""
        hint = "" if named else row["label"]
        chart.line(curve["at"], curve["mean"], colour, width=width, dash=dash, hint=hint)
        points = [("cross", point) for point in row["series"]["spikes"]]
        if len(rows) <= _MANY:
            chart.band(curve, colour, 0.15)
            band = row["series"]["evaluation"] or {"at": [], "mean": []}
            points += [("dot", point) for point in zip(band["at"], band["mean"], strict=True)]
        for kind, (at, loss) in points:
            if at >= chart.x.low and chart.y.low <= loss <= chart.y.high:
                chart.marker(at, loss, kind, colour)
    for i, row in enumerate(rows if named else ()):
        right, top = chart.box[1], chart.box[2] + 12 * i + 8
        line = {"stroke": row["colour"], "dash": _DASHES[i % len(_DASHES)]}
        width = 1 if row["parent"] else 1.8
        chart.path([(right - 24, top - 3), (right, top - 3)], width=width, **line)
        chart.text(right - 28, top, _label(row["label"]), anchor="end")


def _difference_panels(rows: Sequence[Values]) -> list[Chart]:
    """Return one small figure per row: its training loss minus the baseline's."""
    drawn = [row for row in rows if row["series"]["training_difference"]]
    bands = [row["series"]["training_difference"] for row in drawn]
    limit = _panel_limit(bands)
    charts = []
    for row, band in list(zip(drawn, bands, strict=True))[:MAX_PANELS]:
        title = f"Loss of {row['name']} minus the baseline's, over tokens"
        end, name = band["at"][-1], f"difference-{_file(row['name'])}"
        ranges, heading = (Scale(0, end), Scale(-limit, limit)), _label(row["label"])
        chart = Chart(name, "panels", title, _PANEL, (38, 8, 18, 18), *ranges, heading)
        chart.x_axis("", format_amount, count=3)
        chart.y_axis(_difference_tick, count=3)
        chart.line([0, end], [0, 0], "ink", width=0.8)
        chart.band(band, row["colour"], 0.2)
        chart.line(band["at"], band["mean"], row["colour"])
        points = row["series"]["evaluation_difference"]
        for x, y in zip(points["at"], points["mean"], strict=True) if points else ():
            if abs(y) <= limit:
                chart.marker(x, y, "dot", row["colour"], size=0.7)
        charts.append(chart)
    return charts


def _panel_limit(bands: Sequence[Values]) -> float:
    """Return the common end of the axes; the start of training may lie outside."""
    ends = []
    for band in bands:
        later = len(band["at"]) // 5
        ends.append(max(abs(x) for x in (*band["low"][later:], *band["high"][later:])))
    return 1.1 * min(max(ends, default=0), _CUT * median(ends or [0])) or 1e-4


def _number(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


# Loss against cost.


def _cost(rows: Sequence[Values]) -> list[Chart]:
    """Return the losses over the training FLOPs; none below two rows, or if a cost is not known."""
    done = [row for row in rows if row["val_loss"] is not None]
    costs = [total_flops(row) for row in done]
    values = [cost for cost in costs if cost is not None]
    if len(done) < 2 or len(values) < len(done):
        return []
    spreads = [row["val_loss_sd"] or 0 for row in done]
    losses = [row["val_loss"] for row in done]
    low = min(loss - sd for loss, sd in zip(losses, spreads, strict=True))
    high = max(loss + sd for loss, sd in zip(losses, spreads, strict=True))
    ranges = _wider(min(values), max(values)), _wider(low, high)
    name = ("cost", "cost", "Loss against training FLOPs")
    chart = Chart(*name, (_WIDTH, 210), (42, 12, 24, 38), *ranges)
    chart.caption = (
        "Mean validation loss over seeds ± one standard deviation of the losses, which is not the "
        "error of a difference. Numbers are those of the steps."
    )
    chart.x_axis("training FLOPs", format_amount)
    chart.y_axis(_number)
    labels = []
    for row, value, loss, sd in zip(done, values, losses, spreads, strict=True):
        chart.line([value, value], [loss - sd, loss + sd], row["colour"], width=0.8)
        kind = _MARKERS.get(row["word"] or "INCONCLUSIVE", "cross")
        chart.marker(value, loss, kind, row["colour"])
        labels.append((*chart.at(value, loss), number_text(row), row["colour"]))
    _spaced_labels(chart, labels)
    return [chart]


def _wider(low: float, high: float) -> Scale:
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1
    return Scale(low - margin, high + margin)


def _spaced_labels(chart: Chart, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Draw the labels right of their points; points that overlap have one label above them."""
    width, step = 18, 13
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
        more = len(names) - _MAX_NAMES
        text = " ".join(names[:_MAX_NAMES]) + f" +{more}" * (more > 0)
        if len(group) > 1:
            # A label at the right edge would leave the figure.
            anchor = "end" if group[0][0] > chart.size[0] - 50 else "start"
            above = max(min(y for _, y, *_ in group) - 6, chart.box[2] + 8)
            chart.text(group[0][0], above, text, colour, anchor=anchor)
        else:
            chart.text(x + 5, y + 3.5, text, colour)
