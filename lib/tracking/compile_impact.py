"""Effect of torch.compile on speed and memory, from pairs of otherwise identical runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from lib.errors import ConfigError, PreflightError, Problem
from lib.gone import ANY_VALUE, removed_symbols
from lib.report.render import json_document
from lib.tracking.sources import RunRef, RunSource, find_run, list_runs, metric_series

SCHEMA_VERSION = 1
# Compared counters: metric → label.
COUNTERS = {
    "tokens_per_second": "tokens per second",
    "gpu/compute_util_avg": "GPU compute (%)",
    "gpu/memory_used_avg_gb": "GPU memory (GB)",
}
# Configuration keys that may differ within a pair: compilation, names, and derived values; also
# symbols that went, if their value never changed a result.
_PAIR_SPECIFIC = {
    "COMPILE",
    "compile_model",
    "run_name",
    "hash8",
    "manifest_sha256",
    "TRACKER_RUN_NAME",
    "WARMUP_ITERATIONS",
}
# Blue and orange of the Okabe-Ito palette, distinguishable for colour-blind readers.
_SIDES = {"eager": "#e69f00", "compiled": "#0072b2"}
DPI = 300


@dataclass(frozen=True)
class CompilePair:
    """Two runs that differ only in torch.compile; the fields are dicts by side, eager or compiled."""

    runs: Mapping[str, str]
    # (step, value) of each counter.
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]

    @property
    def name(self) -> str:
        return self.runs["compiled"]

    def of_side(self, side: str) -> dict[str, float]:
        """Return counter → mean after the first log interval, which contains compilation and
        allocator growth; a counter without later intervals is left out.
        """
        curves = self.curves[side].items()
        return {metric: fmean(v for _, v in curve[1:]) for metric, curve in curves if curve[1:]}

    def means(self, metric: str) -> tuple[float, float] | None:
        """Return the means of both sides; None if either is missing or zero."""
        eager, compiled = (self.of_side(side).get(metric) for side in _SIDES)
        return (eager, compiled) if eager and compiled else None


def read_compile_pairs(
    source: RunSource, project: str, named: Sequence[str] = ()
) -> list[CompilePair]:
    """Return the pairs of ``project``, or only the pairs that contain a run in ``named``.

    Raises ConfigError if there is no pair, if a run does not record whether it was compiled, or if
    several runs qualify as the same side.
    """
    requested = {find_run(source, project, name).id for name in named}
    # Side → runs, by all other settings.
    groups: dict[frozenset[tuple[str, str]], dict[str, list[RunRef]]] = {}
    for run in list_runs(source, project):
        side, rest = _settings(source, run)
        groups.setdefault(rest, {each: [] for each in _SIDES})[side].append(run)
    pairs = [
        _pair(source, group, requested)
        for group in groups.values()
        if all(group.values())
        and (not requested or requested & {run.id for runs in group.values() for run in runs})
    ]
    if not pairs:
        what = "no two runs differ only in torch.compile"
        advice = 'type: make SWEEP="COMPILE=n,y"'
        raise ConfigError(Problem(what, next=advice, code="run.no-compile-pair"))
    return sorted(pairs, key=lambda pair: pair.name)


def _settings(source: RunSource, run: RunRef) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return the side of a run, and the settings that must be equal on both sides."""
    config = source.config(run)
    if "compile_model" not in config:
        what = f"{run.name} has no compile_model in its configuration"
        raise ConfigError(Problem(what, code="run.missing-setting"))
    without_effect = {name for name, off in removed_symbols().items() if off == ANY_VALUE}
    # If the configuration lists all symbols, the step is only a name for some of them.
    specific = _PAIR_SPECIFIC | without_effect | ({"step"} if "COMPILE" in config else set())
    rest = frozenset((name, repr(value)) for name, value in config.items() if name not in specific)
    return "compiled" if config["compile_model"] else "eager", rest


def _pair(
    source: RunSource, group: Mapping[str, Sequence[RunRef]], requested: set[str]
) -> CompilePair:
    """Return the pair of a group; of several runs of a side, the requested one."""
    names, curves = {}, {}
    for side, members in group.items():
        runs = [run for run in members if run.id in requested] or members
        if len(runs) > 1:
            listed = ", ".join(f"{run.name} ({run.id})" for run in runs)
            what = f"several runs with identical settings: {listed}"
            advice = "select one: --run-name NAME, or ID"
            raise ConfigError(Problem(what, next=advice, code="run.ambiguous"))
        names[side], history = runs[0].name, source.history(runs[0])
        curves[side] = {metric: metric_series(history, metric) for metric in COUNTERS}
    return CompilePair(names, curves)


def compile_pairs_to_text(pairs: Sequence[CompilePair]) -> str:
    lines = []
    for pair in pairs:
        for metric, label in COUNTERS.items():
            if means := pair.means(metric):
                sides = f"eager {means[0]:,.2f}  compiled {means[1]:,.2f}"
                lines.append(f"{pair.name}  {label}  {sides}  ratio {means[1] / means[0]:.3f}")
    return "\n".join(lines) + "\n"


def compile_pairs_to_json(pairs: Sequence[CompilePair]) -> str:
    rows = [
        {"name": pair.name}
        | {side: {"run": pair.runs[side], "means": pair.of_side(side)} for side in _SIDES}
        for pair in pairs
    ]
    return json_document(SCHEMA_VERSION, {"pairs": rows})


def plot_compile_impact(pairs: Sequence[CompilePair], folder: Path) -> list[Path]:
    """Write three figures over all pairs and one figure per pair; return their paths.

    Raises ConfigError if no pair has a counter to compare, PreflightError if the folder is not
    writable.
    """
    counters = [metric for metric in COUNTERS if any(pair.means(metric) for pair in pairs)]
    if not counters:
        what = f"no pair of runs has more than one log interval with one of {', '.join(COUNTERS)}"
        advice = "train for longer, or with a shorter LOG_INTERVAL"
        raise ConfigError(Problem(what, next=advice, code="run.missing-metric"))
    width = max(4.5, len(pairs))
    all_pairs, each = partial(_bars, pairs, merged=True), partial(_bars, pairs, merged=False)
    files = {
        "torch_compile_comparison.png": _figure("mean of all pairs", counters, all_pairs),
        "torch_compile_grouped.png": _figure("each pair", counters, each, width),
        "torch_compile_before_after.png": _figure("each pair", counters, partial(_slopes, pairs)),
    }
    for pair in pairs:
        title = "compiled against eager"
        files[f"{pair.name}_vs_baseline.png"] = _figure(title, counters, partial(_curves, pair))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in files.items():
            figure.savefig(folder / name, dpi=DPI, bbox_inches="tight")
    except OSError as error:
        what, advice = f"cannot write: {error.strerror}", "choose another folder: --out DIR"
        problem = Problem(what, str(folder), advice, code="output.not-writable")
        raise PreflightError(problem) from None
    return [folder / name for name in files]


def _figure(
    title: str, counters: Sequence[str], draw: Callable[[Any, str], None], width: float = 4.5
) -> Figure:
    """Return a row of panels, one for each counter, with the legend below."""
    figure = Figure(figsize=(width * len(counters), 4.5), layout="constrained")
    panels = figure.subplots(1, len(counters), squeeze=False).flat
    for metric, panel in zip(counters, panels, strict=True):
        draw(panel, metric)
        # From zero, so that the lengths of bars compare, and with room for labels.
        panel.set_ylim(0, 1.15 * panel.dataLim.y1)
        panel.set_ylabel(COUNTERS[metric])
    figure.suptitle(f"torch.compile, {title}: means without the first log interval")
    legend = {
        label: handle
        for panel in figure.axes
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend([*legend.values()], [*legend], loc="outside lower center", ncols=2, frameon=False)
    return figure


def _bars(pairs: Sequence[CompilePair], panel: Any, metric: str, *, merged: bool) -> None:
    """Draw two bars per pair, labelled with compiled over eager; ``merged``: of all pairs."""
    known = {pair.name: means for pair in pairs if (means := pair.means(metric))}
    names, heights = [*known], [*zip(*known.values(), strict=True)]
    ratios = [compiled / eager for eager, compiled in known.values()]
    if merged:
        names, ratios = [f"pairs: {len(known)}"], [geometric_mean(ratios)]
        heights = [(fmean(each),) for each in heights]
    for shift, (side, color), each in zip((-0.2, 0.2), _SIDES.items(), heights, strict=True):
        at = [index + shift for index in range(len(names))]
        bars = panel.bar(at, each, width=0.4, color=color, label=side)
    panel.bar_label(bars, [f"× {ratio:.3f}" for ratio in ratios], padding=2)
    panel.set_xticks(range(len(names)), names, rotation=30, ha="right")


def _slopes(pairs: Sequence[CompilePair], panel: Any, metric: str) -> None:
    """Draw a line from eager to compiled for each pair."""
    colors = colormaps["tab20"]
    for index, pair in enumerate(pairs):
        if means := pair.means(metric):
            line = {"color": colors(index % colors.N), "marker": "os^Dv"[index % 5]}
            panel.plot([*_SIDES], means, label=pair.name, **line)


def _curves(pair: CompilePair, panel: Any, metric: str) -> None:
    """Draw both runs over iterations, the first interval included."""
    for side, color in _SIDES.items():
        if curve := pair.curves[side][metric]:
            label = f"{side}: {pair.runs[side]}"
            panel.plot(*zip(*curve, strict=True), color=color, marker=".", label=label)
    if means := pair.means(metric):
        panel.set_title(f"× {means[1] / means[0]:.3f}", fontsize="small")
    panel.set_xlabel("iteration")
