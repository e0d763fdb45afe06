"""Loss curves of a plan's runs as one picture (PNG), over training tokens.

Training loss is a running mean, validation loss a line with a dot for each evaluation. Seeds of a
variant are drawn as their mean, over the tokens that all of them have seen. The first fifth of the
training may begin above the frame.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import figures
from lib.errors import ConfigError, Problem
from lib.files import read_json_lines
from lib.plan import Run
from lib.rundir import RunDir

# Share of the curve that the running mean of the training loss looks back on.
_SMOOTHING = 0.03
# Share of the tokens whose losses may lie above the frame.
_BEGINNING = 0.2
_DPI = 150
# Distinguishable without colour, too.
_STYLES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Curve:
    """Losses of one variant in nats per token, each with the training tokens seen."""

    name: str
    train: Sequence[tuple[int, float]]
    val: Sequence[tuple[int, float]]


def read_curves(runs: Sequence[Run[Any]]) -> list[Curve]:
    """A curve for each variant that has begun. ConfigError when none has."""
    found: dict[str, list[tuple[dict[int, float], dict[int, float]]]] = {}
    for run in runs:
        path = RunDir(run.path).metrics
        if path.exists():
            found.setdefault(run.variant.slug, []).append(_read(path))
    curves = [
        Curve(slug, _smooth(_mean([t for t, _ in seeds])), _mean([v for _, v in seeds]))
        for slug, seeds in found.items()
    ]
    curves = [curve for curve in curves if curve.train]
    if not curves:
        raise ConfigError(Problem("no run has a row in its metrics.jsonl yet", next="type: make"))
    return curves


def draw_curves(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Write the picture. PreflightError with the install command when matplotlib is missing."""
    pyplot = figures.pyplot()
    from matplotlib.ticker import EngFormatter

    parts = ("train", "val") if any(len(curve.val) > 1 for curve in curves) else ("train",)
    width = 3 + 5.5 * len(parts)
    figure, panels = pyplot.subplots(
        1, len(parts), figsize=(width, 5), squeeze=False, sharex=True, layout="constrained"
    )
    colors = pyplot.colormaps["tab10"].colors
    for panel, part in zip(panels[0], parts, strict=True):
        styles = itertools.cycle((style, color) for style in _STYLES for color in colors)
        for curve, (style, color) in zip(curves, styles):
            tokens, losses = zip(*vars(curve)[part], strict=True) if vars(curve)[part] else ((), ())
            marker = "." if part == "val" else ""
            panel.plot(tokens, losses, style, color=color, marker=marker, lw=1.2, label=curve.name)
        panel.set_ylim(*visible_losses([vars(curve)[part] for curve in curves]))
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.set_xlabel("training tokens")
        panel.set_ylabel(f"{'validation' if part == 'val' else 'training'} loss (nats per token)")
        panel.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def visible_losses(series: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Least and largest loss that a panel shows: without the fall at the beginning of training,
    which would press all that differs between runs into one line."""
    begun = _BEGINNING * max(at for points in series for at, _ in points)
    later = [loss for points in series for at, loss in points if at > begun]
    low, high = min(later), max(later)
    # A twentieth of room; a flat line gets some, too.
    room = 0.05 * (high - low) or 0.05
    return low - room, high + room


def _read(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Training and validation loss by tokens."""
    train, val = {}, {}
    for record in read_json_lines(path):
        if record["kind"] == "train":
            train[record["tokens"]] = record["loss"]
        elif record["kind"] == "eval":
            val[record["tokens"]] = record["val_loss"]
    return train, val


def _mean(seeds: Sequence[dict[int, float]]) -> list[tuple[int, float]]:
    """Mean over the seeds, where all of them have a value."""
    shared = set.intersection(*(set(seed) for seed in seeds))
    return [(at, sum(seed[at] for seed in seeds) / len(seeds)) for at in sorted(shared)]


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Each loss as the mean of the last few."""
    back = max(1, round(len(points) * _SMOOTHING))
    return [
        (at, sum(loss for _, loss in points[max(0, i - back + 1) : i + 1]) / min(back, i + 1))
        for i, (at, _) in enumerate(points)
    ]
