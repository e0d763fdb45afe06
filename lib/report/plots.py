"""Figures of a study: differences with intervals, loss curves, and the series that only figures draw.

Every figure is narrow enough for a column of a paper and for a phone. A verdict is shown by colour,
marker and word; the colours are safe for colour-blind readers (after Okabe and Ito 2008).
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from lib.json_files import MissingRecord, RecordError
from lib.report.contrasts import AA_ROLE
from lib.report.figures import LINES, Chart, Scale
from lib.report.options import NATS, UNITS
from lib.report.run_results import Curve, bin_width, binned, planned_run, read_curves, run_outcome
from lib.report.study import JudgedStudy, finished_of
from lib.report.text import verdict_colour, verdict_word
from lib.runs.record import RunRecord, derived
from lib.units import format_amount, signed

# A difference this many times beyond the median one is cut at the edge of a forest plot.
_CUT = 4.0
_MAX_LABEL_CHARS = 22
# Points: a column of a paper or the width of a phone; room for a character and a row.
_WIDTH = 360
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
    rows = []
    for row, curves in zip(document["rows"], series, strict=True):
        verdict = verdicts.get(row["against"]["baseline"])
        colour = verdict_colour(verdict) if verdict else "muted" if row["parent"] else "ink"
        word = verdict and verdict["verdict"]
        name = {"label": short_name(row), "colour": colour, "word": word, "series": curves}
        rows.append({**row, **name})
    return [*_forests(document, rows), *_losses(rows, document["unit"])]


def short_name(row: Values) -> str:
    """Return the number and name of a row."""
    return row["name"] if row["number"] is None else f"{row['number']} {row['name']}"


def _label(text: str) -> str:
    """Return the text, shortened in the middle."""
    if len(text) <= _MAX_LABEL_CHARS:
        return text
    half = (_MAX_LABEL_CHARS - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


# Differences with intervals.


def _forests(document: Values, rows: Sequence[Values]) -> list[Chart]:
    """Return the comparisons by kind: with the baseline, with the parent, effects of a design."""
    names: dict[str, str] = {row["name"]: row["label"] for row in rows}
    kinds: dict[str, list[Values]] = {}
    for verdict in (*document["verdicts"], *document["aa_steps"]):
        role = "baseline" if verdict["role"] == AA_ROLE else verdict["role"]
        if verdict["difference"] is not None:
            kinds.setdefault(role if role in _FOREST_TITLES else "effects", []).append(verdict)
    return [_forest(kind, each, names, document["unit"]) for kind, each in kinds.items()]


def _forest(kind: str, verdicts: Sequence[Values], names: Mapping[str, str], unit: str) -> Chart:
    """Return the differences of the comparisons, each in a row, the first one on top."""
    labels = [_label(names.get(v["step"], v["step"])) for v in verdicts]
    texts, limit = list(map(_forest_text, verdicts)), _forest_limit(verdicts)
    left, right = (10 + _CHAR * max(map(len, each)) for each in (labels, texts))
    size, scale = (_WIDTH, 62 + _ROW * len(verdicts)), Scale(len(verdicts) - 0.4, -0.6)
    name = f"forest-{kind}", "forest", _FOREST_TITLES[kind]
    chart = Chart(*name, size, (left, right, 24, 38), Scale(-limit, limit), scale)
    chart.x_axis("", lambda value: f"{value:+.4g}".replace("-", "−") if value else "0")
    direction = f"← lower loss · {unit} · higher loss →"
    chart.text(_WIDTH / 2, size[1] - 6, direction, "muted", anchor="middle")
    chart.line([0, 0], [chart.y.high, chart.y.low], "muted", width=0.8)
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
    if kind == "parent":
        chart.caption += " Steps whose parent is the baseline are in the figure of the baseline."
    left, right, _, _ = chart.box
    for y, (verdict, label, text) in enumerate(zip(verdicts, labels, texts, strict=True)):
        at = chart.at(0, y)[1] + 3.5
        chart.text(left - 6, at, label, anchor="end")
        chart.text(right + 6, at, text, verdict_colour(verdict))
        _forest_row(chart, y, verdict, limit)
    return chart


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
    values = [(*(v["interval_95"] or ()), v["difference"], *v["differences"]) for v in verdicts]
    ends = [max(map(abs, each)) for each in values]
    shown = [end for end in ends if end <= _CUT * median(ends)]
    few = len(shown) >= 0.75 * len(ends) and max(ends) > 2 * max(shown)
    return 1.08 * max(shown if few else ends) or 1e-4


# Curves over training.


def _losses(rows: Sequence[Values], unit: str) -> list[Chart]:
    """Return the losses over training; a validation loss in another unit is left out."""
    drawn = [row for row in rows if row["series"]["training"]]
    if unit != TRAINING_UNIT:
        drawn = [{**row, "series": {**row["series"], "evaluation": None}} for row in drawn]
    if not drawn:
        return []
    curves = [row["series"]["training"] for row in drawn]
    spikes = [loss for row in drawn for _, loss in row["series"]["spikes"]]
    tokens = [at for curve in curves for at in curve["at"]]
    shown = [loss for curve in curves for loss in (*curve["low"], *curve["high"])] + spikes
    x, y = (Scale(min(each), max(each), is_log=True) for each in (tokens, shown))
    name = ("losses", "curves", "Loss over training")
    chart = Chart(*name, (_WIDTH, 250), (36, 12, 24, 38), x, y)
    chart.x_axis("training tokens", format_amount)
    chart.y_axis("{:.4g}".format)
    _loss_curves(chart, drawn)
    few = len(drawn) <= _MANY
    over = f", mean{' and range' * few} over seeds" if any(row["n"] > 1 for row in drawn) else ""
    chart.caption = (
        f"Training loss{over}, in {TRAINING_UNIT}, on logarithmic axes"
        f"{'; dots: validation loss' * (few and unit == TRAINING_UNIT)}."
    )
    if len(drawn) > 1:
        coloured = any(row["word"] for row in drawn)
        words = "; colours are those of the verdicts against it" * coloured
        chart.caption += f" The thick line is the baseline{words}."
    chart.caption += " Crosses: unstable steps." * bool(spikes)
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


# Series over the seeds of each row.


# A series over training: ``at`` (tokens), and mean, smallest (``low``) and largest value (``high``)
# over the seeds; None without runs.
Band = Mapping[str, list[float]] | None


def study_series(study: JudgedStudy) -> list[dict[str, Any]]:
    """Return the curves of each row over its seeds, and its sample: what only figures show."""
    rows, unit = {arm: finished_of(runs) for arm, runs in study.outcomes.items()}, study.plan.unit
    width = bin_width(max((r.final.tokens for row in rows.values() for r in row), default=0))
    return [
        {
            "name": arm,
            "training": _band([_training(record, width) for record in records]),
            "evaluation": _band([_evaluations(record, unit) for record in records]),
            "spikes": [list(point) for r in records for point in read_curves(r).spikes],
            "sample": _sample(records),
        }
        for arm, records in rows.items()
    ]


@derived
def _training(record: RunRecord, width: float) -> Curve:
    """Return the training loss of a run in bins of ``width`` tokens."""
    curves = read_curves(record)
    if curves.width == width:
        return curves.train
    # Another record, which does not keep the rows.
    return binned(RunRecord(record.run).train_rows, width)


def _evaluations(record: RunRecord, unit: str) -> Curve:
    curve, loss = read_curves(record).evaluations, run_outcome(record, unit).loss
    if unit == NATS:
        return curve
    assert loss is not None
    # Nats per token of the evaluation to the unit of the study.
    scale = loss / record.final.val_loss
    return {at: value * scale for at, value in curve.items()}


def _band(seeds: Sequence[Curve]) -> Band:
    """Return the band over the points that all seeds have; None without such a point."""
    shared = [at for at in seeds[0] if all(at in seed for seed in seeds)] if seeds else []
    if not shared:
        return None
    columns = [[seed[at] for seed in seeds] for at in shared]
    mean, low, high = ([form(column) for column in columns] for form in (fmean, min, max))
    return {"at": shared, "mean": mean, "low": low, "high": high}


def _sample(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return the text sample of the first seed; None if the run wrote none."""
    if not records:
        return None
    try:
        text = records[0].sample
    except MissingRecord:
        return None
    except RecordError as error:
        text = f"({error.problems[0].what})"
    return {"seed": planned_run(records[0]).seed, "text": text}
