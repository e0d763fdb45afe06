"""Loss curves of a plan's runs over training tokens, written as one PNG.

The training loss is drawn as a running mean, the validation loss as a line with one dot per
evaluation. Each variant is drawn as the mean over its seeds at the token counts that all seeds have
reached. Losses of the first fifth of training may lie above the visible range. The plotting library
is imported when it is needed.
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, PreflightError, Problem
from lib.json_files import MissingRecord
from lib.plan.run import PlannedRun
from lib.runs.record import EvalRow, RunRecord, TrainRow
from lib.runs.run_dir import RunDir


def load_pyplot() -> Any:
    """Return ``matplotlib.pyplot`` with a file backend.

    Raises PreflightError if matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        problem = Problem(
            "matplotlib is not installed", next="type: make setup", code="env.missing-package"
        )
        raise PreflightError(problem) from None
    return plt


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


def read_loss_curves(runs: Sequence[PlannedRun[Any]]) -> list[LossCurve]:
    """Return one curve per variant with logged losses. Raises ConfigError if no run has any."""
    by_variant: dict[str, list[tuple[dict[int, float], dict[int, float]]]] = {}
    for run in runs:
        with contextlib.suppress(MissingRecord):
            losses = _losses(RunRecord(RunDir(run.path)))
            by_variant.setdefault(run.variant.slug, []).append(losses)
    curves = [
        LossCurve(slug, _smooth(_mean([t for t, _ in seeds])), _mean([v for _, v in seeds]))
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
        panel.set_ylim(*loss_axis_limits([vars(curve)[part] for curve in curves]))
        panel.set_xlim(left=0)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.set_xlabel("training tokens")
        panel.set_ylabel(f"{'validation' if part == 'val' else 'training'} loss (nats per token)")
        panel.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def loss_axis_limits(series: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Return the smallest and largest loss of a panel's y-axis.

    The steep fall at the start of training is excluded; it would compress the differences between
    runs into one line.
    """
    start = _HIDDEN_START * max(at for points in series for at, _ in points)
    later = [loss for points in series for at, loss in points if at > start]
    low, high = min(later), max(later)
    # A margin of 5 %, with a minimum for a flat line.
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin


def _losses(record: RunRecord) -> tuple[dict[int, float], dict[int, float]]:
    """Return training and validation loss by training tokens."""
    train = {row.tokens: row.loss for row in record.metrics if isinstance(row, TrainRow)}
    val = {row.tokens: row.val_loss for row in record.metrics if isinstance(row, EvalRow)}
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
