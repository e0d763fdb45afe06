"""Figures that compare runs with and without torch.compile."""

from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from lib.errors import ConfigError, PreflightError, Problem
from lib.figures import pyplot
from lib.queries.compile_impact import COUNTERS, Pair

DPI = 300
# Blue and orange of the Okabe-Ito palette, distinguishable for colour-blind readers.
_COLORS = {"eager": "#e69f00", "compiled": "#0072b2"}
_MEANS_NOTE = "means without the first log interval"


def draw_compile_impact(pairs: Sequence[Pair], folder: Path) -> list[Path]:
    """Write three figures over all pairs and one figure per pair; return their paths.

    Raises ConfigError if no pair has a counter to compare, PreflightError if the folder is not
    writable.
    """
    counters = [(m, label) for m, label in COUNTERS if any(p.ratio(m) is not None for p in pairs)]
    if not counters:
        names = ", ".join(metric for metric, _ in COUNTERS)
        what = f"no pair of runs has more than one log interval with one of {names}"
        advice = "train for longer, or with a shorter LOG_INTERVAL"
        raise ConfigError(Problem(what, next=advice, code="run.missing-metric"))
    figures = {
        "torch_compile_comparison.png": _comparison(pairs, counters),
        "torch_compile_grouped.png": _grouped(pairs, counters),
        "torch_compile_before_after.png": _before_after(pairs, counters),
        **{f"{pair.compiled.run}_vs_baseline.png": _spotlight(pair, counters) for pair in pairs},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=DPI, bbox_inches="tight")
            pyplot().close(figure)
    except OSError as error:
        what = f"cannot write: {error.strerror}"
        advice = "choose another folder: --to DIR"
        raise PreflightError(
            Problem(what, str(folder), advice, code="output.not-writable")
        ) from None
    return [folder / name for name in figures]


_Counters = Sequence[tuple[str, str]]


def _comparison(pairs: Sequence[Pair], counters: _Counters) -> Any:
    """Draw one panel per counter with the mean over all pairs, eager beside compiled."""
    figure, axes = _panels(1, len(counters), (4 * len(counters), 4))
    for panel, (metric, label) in zip(axes[0], counters, strict=True):
        both = [pair for pair in pairs if pair.ratio(metric) is not None]
        means = [
            fmean(side.means[metric] for side in sides)
            for sides in ([p.eager for p in both], [p.compiled for p in both])
        ]
        bars = panel.bar([*_COLORS], means, color=[*_COLORS.values()])
        panel.bar_label(bars, fmt="{:,.4g}", padding=2)
        _from_zero(panel, label)
        factor = geometric_mean([ratio for p in both if (ratio := p.ratio(metric))])
        number = f"{len(both)} pair" + "s" * (len(both) > 1)
        panel.set_title(f"× {factor:.3f}, geometric mean of {number}", fontsize="medium")
    return _titled(figure, f"torch.compile over all pairs: {_MEANS_NOTE}")


def _grouped(pairs: Sequence[Pair], counters: _Counters) -> Any:
    """Draw one panel per counter with two bars per pair, labelled with compiled over eager."""
    size = (max(6.0, 1.1 * len(pairs) + 2), 3.2 * len(counters))
    figure, axes = _panels(len(counters), 1, size, sharex=True)
    for panel, (metric, label) in zip(axes[:, 0], counters, strict=True):
        for shift, (name, color) in zip((-0.2, 0.2), _COLORS.items(), strict=True):
            heights = [vars(pair)[name].means.get(metric) for pair in pairs]
            present = [
                (i + shift, height) for i, height in enumerate(heights) if height is not None
            ]
            bars = panel.bar(*zip(*present), width=0.4, color=color, label=name)
            if name == "compiled":
                ratios = [pairs[round(at - shift)].ratio(metric) for at, _ in present]
                labels = ["" if ratio is None else f"× {ratio:.2f}" for ratio in ratios]
                panel.bar_label(bars, labels, padding=2, fontsize="small")
        panel.set_xticks(range(len(pairs)), [p.name for p in pairs], rotation=30, ha="right")
        _from_zero(panel, label)
    return _titled(figure, f"torch.compile, each pair: {_MEANS_NOTE}", axes[0, 0], columns=2)


def _before_after(pairs: Sequence[Pair], counters: _Counters) -> Any:
    """Draw one panel per counter with a line from eager to compiled for each pair."""
    figure, axes = _panels(1, len(counters), (4.5 * len(counters), 5))
    colors = pyplot().get_cmap("tab10" if len(pairs) <= 10 else "tab20").colors
    for panel, (metric, label) in zip(axes[0], counters, strict=True):
        for index, pair in enumerate(pairs):
            heights = [side.means.get(metric, nan) for side in (pair.eager, pair.compiled)]
            line = {"color": colors[index % len(colors)], "marker": "os^Dv"[index % 5]}
            panel.plot((0, 1), heights, label=pair.name, **line)
        panel.set_xticks((0, 1), [*_COLORS])
        panel.set_xlim(-0.3, 1.3)
        _from_zero(panel, label)
    title = f"torch.compile, before and after: {_MEANS_NOTE}"
    return _titled(figure, title, axes[0, 0], columns=2 * len(counters))


def _spotlight(pair: Pair, counters: _Counters) -> Any:
    """Draw one panel per counter with both runs over iterations, first interval included."""
    figure, axes = _panels(len(counters), 1, (7, 0.8 + 2.6 * len(counters)), sharex=True)
    for panel, (metric, label) in zip(axes[:, 0], counters, strict=True):
        for name, color in _COLORS.items():
            side = vars(pair)[name]
            if side.curves[metric]:
                steps, values = zip(*side.curves[metric], strict=True)
                panel.plot(steps, values, color=color, marker=".", label=f"{name}: {side.run}")
        if (ratio := pair.ratio(metric)) is not None:
            panel.set_title(f"× {ratio:.3f}: {_MEANS_NOTE}", fontsize="small")
        _from_zero(panel, label)
        panel.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("iteration")
    return _titled(figure, f"{pair.name}: compiled against eager", axes[0, 0], columns=1)


def _panels(rows: int, columns: int, size: tuple[float, float], **more: Any) -> Any:
    return pyplot().subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", **more
    )


def _from_zero(panel: Any, label: str) -> None:
    """Start the y-axis at zero so that bar lengths compare, and leave room for labels."""
    panel.set_ylim(0, 1.15 * panel.dataLim.y1)
    panel.set_ylabel(label)


def _titled(figure: Any, title: str, legend_panel: Any = None, columns: int = 1) -> Any:
    """Add a title, and below the panels the legend of ``named``."""
    figure.suptitle(title, fontsize="medium")
    if legend_panel is not None:
        figure.legend(
            *legend_panel.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=columns,
            fontsize="small",
            frameon=False,
        )
    return figure
