"""Figures: one style for all, as PDF, PNG, SVG, or inside a web page.

Text of a figure is text in every vector format. Files have the same bytes for the same data. The
plotting library is imported when it is needed.
"""

import io
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lib.errors import PreflightError, Problem
from lib.files import write_atomic


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
