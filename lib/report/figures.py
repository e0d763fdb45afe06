"""Charts: axes and shapes in points, drawn as an element of a web page and as PDF, PNG and SVG files.

The same data give the same bytes. PNG and PDF are written by matplotlib, which is imported then.
"""

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.files import write_atomic

# Role → colour on a white page, each with a contrast of at least 4.5 as text except the last three.
# On the web page, the role is a CSS variable.
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
# Folder of the figures, beside the runs of a study.
FIGURES_FOLDER = "figures"
_FORMATS = ("pdf", "png", "svg")
_PAPER_DPI = 300
_POINTS_PER_INCH = 72
_FONT_SIZE = 10
# Characters that no document may contain, and that could hide or reorder text.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Drawn in this order; lines and areas are cut at the edge of the axes.
GRID, LINES, MARKS, TEXT = range(4)
# A break of a line is None.
Points = Sequence[tuple[float, float] | None]
_MARKERS: dict[str, Points] = {
    "down": [(-3.2, -2.6), (3.2, -2.6), (0, 3.2)],
    "up": [(-3.2, 2.6), (3.2, 2.6), (0, -3.2)],
    "left": [(2.6, -3.2), (2.6, 3.2), (-3.2, 0)],
    "right": [(-2.6, -3.2), (-2.6, 3.2), (3.2, 0)],
    "square": [(-2.6, -2.6), (2.6, -2.6), (2.6, 2.6), (-2.6, 2.6)],
    "cross": [(-2.6, -2.6), (2.6, 2.6), None, (-2.6, 2.6), (2.6, -2.6)],
    "dot": [(2.8 * math.cos(a * math.pi / 8), 2.8 * math.sin(a * math.pi / 8)) for a in range(16)],
}


def without_control_characters(text: str) -> str:
    """Return the text with U+FFFD for each character that could hide or reorder text."""
    return _CONTROL.sub("\ufffd", text)


@dataclass(frozen=True)
class Scale:
    """The range of an axis, linear or logarithmic; limits that are equal are moved apart."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the position of the value: 0 at ``low``, 1 at ``high``."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = map(math.log, (low, high, max(value, low / 1e3)))
        return (value - low) / (high - low) if high != low else 0.5

    def ticks(self) -> list[float]:
        """Return about four round values inside the range."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
            for digits in ((1,), (1, 3), (1, 2, 5)):
                values = [d * 10.0**e for e in range(first, last + 1) for d in digits]
                inside = [value for value in values if self.low <= value <= self.high]
                if len(inside) >= 3:
                    return inside
        width = (self.high - self.low) / 4
        if not width > 0:
            return [self.low]
        unit = 10.0 ** math.floor(math.log10(width))
        step = next(unit * digit for digit in (1, 2, 5, 10) if unit * digit >= 0.999 * width)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


@dataclass
class Chart:
    """A figure: file name without suffix, kind, title and caption, axes, and the shapes inside."""

    name: str
    group: str
    title: str
    size: tuple[float, float]
    # Left, right, top, bottom.
    margins: tuple[float, float, float, float]
    x: Scale
    y: Scale
    caption: str = ""
    shapes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text(0, 11, self.title, bold=True)

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Return left, right, top and bottom of the axes in points."""
        left, right, top, bottom = self.margins
        return left, self.size[0] - right, top, self.size[1] - bottom

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of the values in points; ``y`` increases upwards."""
        left, right, top, bottom = self.box
        share_x, share_y = self.x.share(x), self.y.share(y)
        return left + (right - left) * share_x, bottom + (top - bottom) * share_y

    def path(self, points: Points, layer: int = GRID, **style: Any) -> None:
        """Add a line or an area through the points: ``stroke``, ``fill``, ``width``, ``dash``,
        ``opacity``, and a ``hint`` that a pointer shows.
        """
        self.shapes.append({"layer": layer, "points": points, **style})

    def text(self, x: float, y: float, text: str, role: str = "ink", **style: Any) -> None:
        """Add text at a place in points: ``anchor`` start, middle or end; ``bold``."""
        self.shapes.append({"layer": TEXT, "text": text, "x": x, "y": y, "role": role, **style})

    def line(self, x: Sequence[float], y: Sequence[float], role: str, **style: Any) -> None:
        points = [self.at(*point) for point in zip(x, y, strict=True)]
        self.path(points, LINES, stroke=role, **{"width": 1.2, **style})

    def band(self, band: Mapping[str, Sequence[float]], role: str, opacity: float) -> None:
        """Add the area between the lowest and the highest values."""
        upper = [self.at(*point) for point in zip(band["at"], band["high"], strict=True)]
        lower = [self.at(*point) for point in zip(band["at"], band["low"], strict=True)]
        self.path([*upper, *reversed(lower)], LINES, fill=role, opacity=opacity)

    def marker(self, x: float, y: float, kind: str, role: str, *, fill: str = "") -> None:
        """Add a marker, with its fill if the colour is another one."""
        left, top = self.at(x, y)
        points = [p and (left + p[0], top + p[1]) for p in _MARKERS[kind]]
        fill = "" if kind == "cross" else fill or role
        self.path(points, MARKS, stroke=role, fill=fill, width=1)

    def x_axis(self, label: str, form: Callable[[float], str]) -> None:
        """Draw the horizontal axis, with vertical lines of the grid."""
        left, right, top, bottom = self.box
        self.path([(left, bottom), (right, bottom)], stroke="muted", width=0.6)
        for value in self.x.ticks():
            at = self.at(value, self.y.low)[0]
            self.path([(at, top), (at, bottom)], stroke="grid", width=0.6)
            self.text(at, bottom + 12, form(value), "muted", anchor="middle")
        self.text((left + right) / 2, bottom + 25, label, "muted", anchor="middle")

    def y_axis(self, form: Callable[[float], str]) -> None:
        """Draw the labels of the vertical axis, with horizontal lines of the grid."""
        left, right, _, _ = self.box
        for value in self.y.ticks():
            at = self.at(self.x.low, value)[1]
            self.path([(left, at), (right, at)], stroke="grid", width=0.6)
            self.text(left - 4, at + 3.5, form(value), "muted", anchor="end")


def svg_element(chart: Chart) -> str:
    """Return the chart as an element of a web page: colours and font are those of the page."""
    width, height = chart.size
    left, right, top, bottom = chart.box
    clip = f"clip-{chart.name}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-size="{_FONT_SIZE}"><clipPath id="{clip}"><rect x="{left:g}" y="{top:g}" '
        f'width="{right - left:.2f}" height="{bottom - top:.2f}"/></clipPath>'
    ]
    for layer in range(TEXT + 1):
        parts.append(f'<g clip-path="url(#{clip})">' if layer == LINES else "<g>")
        parts += [_svg_shape(shape) for shape in chart.shapes if shape["layer"] == layer]
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _svg_shape(shape: dict[str, Any]) -> str:
    if "text" in shape:
        weight = ' font-weight="600"' if shape.get("bold") else ""
        return (
            f'<text x="{shape["x"]:.1f}" y="{shape["y"]:.1f}" '
            f'text-anchor="{shape.get("anchor", "start")}"{weight} '
            f'style="fill:{_variable(shape["role"])}">{_escaped(shape["text"])}</text>'
        )
    data, command = "", "M"
    for point in shape["points"]:
        data += f"{command}{point[0]:.1f} {point[1]:.1f}" if point else ""
        command = "L" if point else "M"
    data += "Z" * bool(shape.get("fill"))
    style = f"fill:{_variable(shape.get('fill'))};stroke:{_variable(shape.get('stroke'))}"
    names = {"width": "stroke-width", "dash": "stroke-dasharray", "opacity": "opacity"}
    style += "".join(f";{name}:{shape[key]}" for key, name in names.items() if shape.get(key))
    hint = f"<title>{_escaped(shape['hint'])}</title>" if shape.get("hint") else ""
    return f'<path d="{data}" style="{style}">{hint}</path>'


def _escaped(text: str) -> str:
    return html.escape(without_control_characters(text))


def _variable(role: str | None) -> str:
    return f"var(--{role})" if role else "none"


def write_figures(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write each chart into ``folder`` in every format. Return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{chart.name}.{s}": (chart, s) for chart in charts for s in _FORMATS}
    for path, (chart, suffix) in files.items():
        write_atomic(path, _svg_file(chart) if suffix == "svg" else _drawn(chart, suffix))
    return list(files)


def _svg_file(chart: Chart) -> str:
    # White also where a viewer has a dark background.
    page = f'<rect width="100%" height="100%" fill="{PALETTE["page"]}"/><clipPath '
    body = svg_element(chart).replace("<clipPath ", page, 1)
    body = re.sub(r"var\(--(\w+)\)", lambda role: PALETTE[role[1]], body)
    return body.replace("<svg ", '<svg font-family="DejaVu Sans, sans-serif" ', 1) + "\n"


def _drawn(chart: Chart, suffix: str) -> bytes:
    """Return the file of a chart, without the time at which it was made."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = chart.size
    with rc_context({"font.family": "DejaVu Sans", "pdf.fonttype": 42}):
        figure = Figure(figsize=(width / _POINTS_PER_INCH, height / _POINTS_PER_INCH))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for shape in chart.shapes:
            _draw(chart, axes, shape)
        stream, date = io.BytesIO(), {"pdf": "CreationDate", "png": "Software"}[suffix]
        figure.savefig(
            stream, format=suffix, dpi=_PAPER_DPI, metadata={date: None}, facecolor="white"
        )
    return stream.getvalue()


def _draw(chart: Chart, axes: Any, shape: dict[str, Any]) -> None:
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path as Outline

    if "text" in shape:
        align = {"start": "left", "middle": "center", "end": "right"}[shape.get("anchor", "start")]
        text = without_control_characters(shape["text"]).replace("$", r"\$")
        style = {"size": 0.9 * _FONT_SIZE, "weight": "bold" if shape.get("bold") else "normal"}
        place = shape["x"], shape["y"]
        axes.text(*place, text, color=PALETTE[shape["role"]], ha=align, zorder=TEXT, **style)
        return
    places, codes, code = [], [], Outline.MOVETO
    for point in shape["points"]:
        if point:
            places.append(point)
            codes.append(code)
        code = Outline.LINETO if point else Outline.MOVETO
    if shape.get("fill"):
        places.append(places[0])
        codes.append(Outline.CLOSEPOLY)
    patch = PathPatch(
        Outline(places, codes),
        facecolor=PALETTE[shape["fill"]] if shape.get("fill") else "none",
        edgecolor=PALETTE[shape["stroke"]] if shape.get("stroke") else "none",
        linewidth=shape.get("width", 0),
        linestyle=(0, tuple(map(float, shape["dash"].split()))) if shape.get("dash") else "-",
        alpha=shape.get("opacity"),
        zorder=shape["layer"],
    )
    axes.add_patch(patch)
    if shape["layer"] == LINES:
        left, right, top, bottom = chart.box
        box = Rectangle((left, top), right - left, bottom - top, transform=axes.transData)
        patch.set_clip_path(box)
