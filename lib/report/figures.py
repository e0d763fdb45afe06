"""Figures: one style for all, as PDF, PNG, SVG, or inside a web page; and the loss curves of a plan.

Text of a figure is text in every vector format. Files have the same bytes for the same data. The
plotting library is imported when it is needed.

The loss curves over training tokens are one PNG. The training loss is drawn as a running mean, the
validation loss as a line with one dot per evaluation. Each variant is drawn as the mean over its
seeds at the token counts that all seeds have reached. Losses of the first fifth of training may lie
above the visible range.
"""

import contextlib
import io
import itertools
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lib.errors import ConfigError, PreflightError, Problem
from lib.files import write_atomic
from lib.json_files import MissingRecord
from lib.plan.run import PlannedRun
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from lib.tracking.stability import unstable_points, unstable_steps


def load_pyplot() -> Any:
    """Return ``matplotlib.pyplot`` with a file backend.

    Raises PreflightError if matplotlib is not installed.
    """
    load_matplotlib().use("Agg")
    from matplotlib import pyplot

    return pyplot


def load_matplotlib() -> Any:
    """Return ``matplotlib``. Raises PreflightError if it cannot be imported."""
    try:
        import matplotlib
    except ImportError:
        problem = Problem(
            "matplotlib is not installed", next="type: make setup", code="env.missing-package"
        )
        raise PreflightError(problem) from None
    return matplotlib


# Role → colour on a white page, each with a contrast of at least 4.5 as text except the last three.
# A web page replaces each by its CSS variable of the same name, so no two may be equal.
PALETTE = {
    "better": "#0067a3",
    "worse": "#b64700",
    "equivalent": "#00785a",
    "inconclusive": "#5f6368",
    "unfair": "#9c3d77",
    "diverged": "#8a6100",
    "ink": "#1b1b1a",
    "muted": "#6a6963",
    "page": "#fefefe",
    "seed": "#a9a8a2",
    "grid": "#e2e1dc",
}
# Inches; a column of a two-column page is about 3.4 wide.
_WIDTH = 4.4
_PANEL = (2.2, 1.45)
_STYLE = {
    "axes.edgecolor": PALETTE["muted"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": PALETTE["muted"],
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": PALETTE["ink"],
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "grid.color": PALETTE["grid"],
    "grid.linewidth": 0.6,
    "pdf.fonttype": 42,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "kablate",
    "text.color": PALETTE["ink"],
    "xtick.color": PALETTE["muted"],
    "xtick.labelsize": 7.5,
    "ytick.color": PALETTE["muted"],
    "ytick.labelcolor": PALETTE["ink"],
    "ytick.labelsize": 8,
}
# Folder of the figures, beside the runs of a study.
FIGURES_FOLDER = "figures"
FIGURE_FORMATS = ("pdf", "png", "svg")
_PAPER_DPI = 300


@dataclass(frozen=True)
class NamedFigure:
    """One figure: file name without suffix, kind, title and caption."""

    name: str
    group: str
    title: str
    caption: str
    drawing: Any


class StudyCanvas:
    """Factory of axes, and context in which everything is drawn in the common style.

    Raises PreflightError without matplotlib.
    """

    def __init__(self) -> None:
        self._matplotlib = load_matplotlib()
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator

        self._figure, self._engineering, self._locator = Figure, EngFormatter, MaxNLocator
        self._style = ExitStack()

    def __enter__(self) -> Self:
        self._style.enter_context(self._matplotlib.rc_context(_STYLE))
        return self

    def __exit__(self, *error: object) -> None:
        self._style.close()

    def colour(self, role: str) -> str:
        """Return the colour of a role of ``PALETTE``."""
        return PALETTE[role]

    def axes(
        self, height: float, *, left: float, right: float, bottom: float, top: float
    ) -> tuple[Any, Any]:
        """Return a figure of one column, and its axes inside the margins; lengths in inches."""
        return self._axes((_WIDTH, height), (left, right, bottom, top))

    def panel(self) -> tuple[Any, Any]:
        """Return a figure of half a column, and its axes."""
        figure, axes = self._axes(_PANEL, (0.55, 0.1, 0.34, 0.24))
        axes.tick_params(labelsize=7)
        return figure, axes

    def tokens_axis(self, axes: Any, label: str = "training tokens") -> None:
        """Format the horizontal axis of training tokens, from 0."""
        axes.set_xlim(left=0)
        self.amount_axis(axes, label)

    def amount_axis(self, axes: Any, label: str) -> None:
        """Format the horizontal axis with few ticks and unit prefixes."""
        axes.xaxis.set_major_formatter(self._engineering(sep=""))
        self.few_ticks(axes, label)

    def few_ticks(self, axes: Any, label: str) -> None:
        """Format the horizontal axis with ticks that remain separate on a phone."""
        axes.xaxis.set_major_locator(self._locator(4))
        axes.set_xlabel(label)

    def _axes(
        self, size: tuple[float, float], margins: tuple[float, float, float, float]
    ) -> tuple[Any, Any]:
        (width, height), (left, right, bottom, top) = size, margins
        figure = self._figure(figsize=size)
        inside = (width - left - right) / width, (height - bottom - top) / height
        axes = figure.add_axes((left / width, bottom / height, *inside))
        axes.yaxis.set_major_locator(self._locator(4))
        axes.tick_params(length=2, width=0.6)
        axes.set_axisbelow(True)
        return figure, axes


def svg_element(figure: NamedFigure) -> str:
    """Return the figure as an element of a web page: colours and font are those of the page.

    Ids are prefixed with the figure's name, because all figures share one page.
    """
    text = _saved(figure.drawing, "svg").decode()
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'(?<=<g) id="[^"]*"', "", body)
    body = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{figure.name}-", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]+;? ?", "", body)
    # Two decimals of a point are finer than any screen.
    body = re.sub(r"<[^>]*>", lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), body)
    for role, colour in PALETTE.items():
        body = body.replace(colour, f"var(--{role})")
    return re.sub(r"\s*\n\s*", " ", body).replace("> <", "><").strip()


def write_figures(figures: Sequence[NamedFigure], folder: Path) -> list[Path]:
    """Write each figure into ``folder`` in every format of ``FIGURE_FORMATS``. Return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in figures:
        for suffix in FIGURE_FORMATS:
            path = folder / f"{figure.name}.{suffix}"
            write_atomic(path, _saved(figure.drawing, suffix, facecolor="white"))
            paths.append(path)
    return paths


def _saved(drawing: Any, suffix: str, **options: Any) -> bytes:
    """Return the file of a figure, without the time at which it was made."""
    dates = {"pdf": "CreationDate", "png": "Software", "svg": "Date"}
    stream = io.BytesIO()
    with load_matplotlib().rc_context(_STYLE):
        drawing.savefig(
            stream, format=suffix, dpi=_PAPER_DPI, metadata={dates[suffix]: None}, **options
        )
    return stream.getvalue()


# Loss curves of a plan.


# Window of the running mean of the training loss, as a fraction of the curve.
_SMOOTHING = 0.03
# Fraction of the tokens, from the start, whose losses may lie above the visible range.
_HIDDEN_START = 0.2
_DPI = 150
# Line styles keep the curves distinguishable without colour.
_STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class LossCurve:
    """Losses of one variant in nats per token, as (training tokens, loss) pairs."""

    name: str
    train: Sequence[tuple[int, float]]
    val: Sequence[tuple[int, float]]
    # Unstable steps of single seeds.
    spikes: Sequence[tuple[int, float]] = ()


def read_loss_curves(runs: Sequence[PlannedRun[Any]]) -> list[LossCurve]:
    """Return one curve per variant with logged losses. Raises ConfigError if no run has any."""
    by_variant: dict[str, list[tuple[dict[int, float], dict[int, float]]]] = {}
    spikes: dict[str, list[tuple[int, float]]] = {}
    for run in runs:
        with contextlib.suppress(MissingRecord):
            record = RunRecord(RunDir(run.path))
            losses = _losses(record)
            points = unstable_points(record, unstable_steps(record))
            by_variant.setdefault(run.variant.slug, []).append(losses)
            spikes.setdefault(run.variant.slug, []).extend(points)
    curves = [
        LossCurve(
            slug,
            _smooth(_mean([t for t, _ in seeds])),
            _mean([v for _, v in seeds]),
            spikes[slug],
        )
        for slug, seeds in by_variant.items()
    ]
    curves = [curve for curve in curves if curve.train]
    if not curves:
        raise ConfigError(
            Problem(
                "no run has a row in its metrics.jsonl yet",
                next="type: make",
                code="run.missing-metric",
            )
        )
    return curves


def plot_loss_curves(curves: Sequence[LossCurve], title: str, path: Path) -> None:
    """Write the figure to ``path``. Raises PreflightError if matplotlib is not installed."""
    pyplot = load_pyplot()
    from matplotlib.ticker import EngFormatter

    parts = ("train", "val") if any(len(curve.val) > 1 for curve in curves) else ("train",)
    width = 3 + 5.5 * len(parts)
    figure, panels = pyplot.subplots(
        1, len(parts), figsize=(width, 5), squeeze=False, sharex=True, layout="constrained"
    )
    colors = pyplot.colormaps["tab10"].colors
    for panel, part in zip(panels[0], parts, strict=True):
        styles = itertools.cycle((style, color) for style in _STYLES for color in colors)
        for curve, (style, color) in zip(curves, styles, strict=False):
            tokens, losses = zip(*vars(curve)[part], strict=True) if vars(curve)[part] else ((), ())
            marker = "." if part == "val" else ""
            panel.plot(tokens, losses, style, color=color, marker=marker, lw=1.2, label=curve.name)
            if part == "train" and curve.spikes:
                panel.plot(*zip(*curve.spikes, strict=True), "x", color=color)
        spikes = [loss for curve in curves for _, loss in curve.spikes] if part == "train" else []
        panel.set_ylim(*loss_axis_limits([vars(curve)[part] for curve in curves], spikes))
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.set_xlabel("training tokens")
        panel.set_ylabel(f"{'validation' if part == 'val' else 'training'} loss (nats per token)")
        panel.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def loss_axis_limits(
    series: Sequence[Sequence[tuple[int, float]]], spikes: Sequence[float] = ()
) -> tuple[float, float]:
    """Return the smallest and largest loss of a panel's y-axis.

    The steep fall at the start of training is excluded; it would compress the differences between
    runs into one line. Losses of unstable steps are ``spikes``, which are never cut off.
    """
    start = _HIDDEN_START * max(at for points in series for at, _ in points)
    later = [*spikes, *(loss for points in series for at, loss in points if at > start)]
    low, high = min(later), max(later)
    # A margin of 5 %, with a minimum for a flat line.
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def _losses(record: RunRecord) -> tuple[dict[int, float], dict[int, float]]:
    """Return training and validation loss by training tokens."""
    train = {row.tokens: row.loss for row in record.train_rows}
    val = {row.tokens: row.val_loss for row in record.eval_rows}
    return train, val


def _mean(seeds: Sequence[dict[int, float]]) -> list[tuple[int, float]]:
    """Return the mean over the seeds at every token count that all seeds have."""
    shared = set.intersection(*(set(seed) for seed in seeds))
    return [(at, sum(seed[at] for seed in seeds) / len(seeds)) for at in sorted(shared)]


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the running mean of the losses."""
    window = max(1, round(len(points) * _SMOOTHING))
    return [
        (at, sum(loss for _, loss in points[max(0, i - window + 1) : i + 1]) / min(window, i + 1))
        for i, (at, _) in enumerate(points)
    ]
