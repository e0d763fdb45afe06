"""Effect of torch.compile on speed and memory, from pairs of otherwise identical runs.

The effect is reported as text, JSON and figures.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from lib.errors import ConfigError, PreflightError, Problem
from lib.gone import ANY_VALUE, removed_symbols
from lib.report.render import json_document
from lib.tracking.sources import RunRef, RunSource, find_run, list_runs, metric_series
from lib.units import first_of

SCHEMA_VERSION = 1
# Compared counters: (metric, label).
COMPILE_METRICS = (
    ("tokens_per_second", "tokens per second"),
    ("gpu/compute_util_avg", "GPU compute (%)"),
    ("gpu/memory_used_avg_gb", "GPU memory (GB)"),
)

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


@dataclass(frozen=True)
class CompileSideStats:
    """Means of one run after the first log interval; metrics without later intervals are absent."""

    run: str
    means: Mapping[str, float]
    # (step, value) of each metric of COUNTERS.
    curves: Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class CompilePair:
    """Two runs that differ only in torch.compile."""

    # Name of the step, or of the compiled run if several pairs share the step.
    name: str
    eager: CompileSideStats
    compiled: CompileSideStats

    def ratio(self, metric: str) -> float | None:
        """Return compiled over eager; None if either value is missing or zero."""
        before, after = self.eager.means.get(metric), self.compiled.means.get(metric)
        return after / before if before and after else None


@dataclass(frozen=True)
class _Candidate:
    """A run that may be one side of a pair; ``rest`` must be equal on both sides."""

    name: RunRef
    compiled: bool
    step: str
    rest: Mapping[str, Any]


def read_compile_pairs(
    source: RunSource, project: str, named: Sequence[str] = ()
) -> list[CompilePair]:
    """Return the pairs of ``project``, or only the pairs that contain a run in ``named``.

    Raises ConfigError if there is no pair, if a run does not record whether it was compiled, or if
    several runs qualify as the same side.
    """
    requested = {find_run(source, project, name).id for name in named}
    runs = [_candidate(source, run) for run in list_runs(source, project)]
    sides: dict[str, list[_Candidate]] = {}
    for run in runs:
        sides.setdefault(_key(run.rest), []).append(run)
    pairs = [
        _pair(source, members, requested)
        for members in sides.values()
        if {run.compiled for run in members} == {True, False}
        and (not requested or requested & {run.name.id for run in members})
    ]
    if not pairs:
        candidates = [run for run in runs if run.name.id in requested] or runs
        what = f"no two runs differ only in torch.compile{_nearest(candidates, runs)}"
        raise ConfigError(
            Problem(what, next='type: make SWEEP="COMPILE=n,y"', code="run.no-compile-pair")
        )
    counts = Counter(pair.name for pair in pairs)
    pairs = [p if counts[p.name] == 1 else replace(p, name=p.compiled.run) for p in pairs]
    return sorted(pairs, key=lambda pair: pair.name)


def compile_pairs_to_text(pairs: Sequence[CompilePair]) -> str:
    """Return one line per pair and counter."""
    lines = []
    for pair in pairs:
        for metric, label in COMPILE_METRICS:
            if (ratio := pair.ratio(metric)) is not None:
                before, after = pair.eager.means[metric], pair.compiled.means[metric]
                lines.append(
                    f"{pair.name}  {label}  eager {before:,.2f}  compiled {after:,.2f}  "
                    f"ratio {ratio:.3f}"
                )
    return "\n".join(lines) + "\n"


def compile_pairs_to_json(pairs: Sequence[CompilePair]) -> str:
    """Return the pairs as one JSON document with sorted keys."""
    rows = [
        {"name": pair.name, "eager": _plain(pair.eager), "compiled": _plain(pair.compiled)}
        for pair in pairs
    ]
    return json_document(SCHEMA_VERSION, {"pairs": rows})


def _plain(side: CompileSideStats) -> dict[str, Any]:
    return {"run": side.run, "means": dict(side.means)}


def _candidate(source: RunSource, run: RunRef) -> _Candidate:
    config = source.config(run)
    if "compile_model" not in config:
        what = f"{run.name} has no compile_model in its configuration"
        raise ConfigError(Problem(what, code="run.missing-setting"))
    # If the configuration lists all symbols, the step is only a name for some of them.
    without_effect = {name for name, off in removed_symbols().items() if off == ANY_VALUE}
    pair_specific = _PAIR_SPECIFIC | without_effect | ({"step"} if "COMPILE" in config else set())
    rest = {name: value for name, value in config.items() if name not in pair_specific}
    return _Candidate(run, bool(config["compile_model"]), str(config.get("step") or run.name), rest)


def _key(config: Mapping[str, Any]) -> str:
    return repr(sorted((name, repr(value)) for name, value in config.items()))


def _nearest(some: Sequence[_Candidate], all_runs: Sequence[_Candidate]) -> str:
    """Return a text with the two runs that differ in the fewest settings.

    If all runs are compiled, or all eager, return a text that reports that.
    """
    both = [(a, b) for a in some for b in all_runs if a.compiled is not b.compiled]
    if not both:
        return ": all runs are " + ("compiled" if some and some[0].compiled else "eager")
    a, b = min(both, key=lambda pair: len(_differing(*pair)))
    return f": {a.name.name} and {b.name.name} differ in {first_of(_differing(a, b), 6)}"


def _differing(a: _Candidate, b: _Candidate) -> list[str]:
    missing = object()
    names = sorted(a.rest.keys() | b.rest.keys())
    return [n for n in names if a.rest.get(n, missing) != b.rest.get(n, missing)]


def _pair(source: RunSource, members: Sequence[_Candidate], requested: Set[str]) -> CompilePair:
    eager, compiled = (_side_of(members, is_compiled, requested) for is_compiled in (False, True))
    return CompilePair(compiled.step, _side(source, eager.name), _side(source, compiled.name))


def _side_of(members: Sequence[_Candidate], compiled: bool, requested: Set[str]) -> _Candidate:
    """Return the run of one side; of several runs, the requested one."""
    runs = [run for run in members if run.compiled is compiled]
    runs = [run for run in runs if run.name.id in requested] or runs
    if len(runs) > 1:
        names = ", ".join(f"{run.name.name} ({run.name.id})" for run in runs)
        what = f"several runs with identical settings: {names}"
        advice = "select one: --run-name NAME, or ID"
        raise ConfigError(Problem(what, next=advice, code="run.ambiguous"))
    return runs[0]


def _side(source: RunSource, run: RunRef) -> CompileSideStats:
    history = source.history(run)
    curves = {metric: metric_series(history, metric) for metric, _ in COMPILE_METRICS}
    # The first interval contains compilation and allocator growth.
    later = {m: [v for _, v in points[1:]] for m, points in curves.items()}
    return CompileSideStats(
        run.name, {m: fmean(values) for m, values in later.items() if values}, curves
    )


DPI = 300
# Blue and orange of the Okabe-Ito palette, distinguishable for colour-blind readers.
_COLORS = {"eager": "#e69f00", "compiled": "#0072b2"}
_MEANS_NOTE = "means without the first log interval"


def plot_compile_impact(pairs: Sequence[CompilePair], folder: Path) -> list[Path]:
    """Write three figures over all pairs and one figure per pair; return their paths.

    Raises ConfigError if no pair has a counter to compare, PreflightError if the folder is not
    writable.
    """
    counters = [
        (m, label) for m, label in COMPILE_METRICS if any(p.ratio(m) is not None for p in pairs)
    ]
    if not counters:
        names = ", ".join(metric for metric, _ in COMPILE_METRICS)
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
    except OSError as error:
        what = f"cannot write: {error.strerror}"
        advice = "choose another folder: --out DIR"
        raise PreflightError(
            Problem(what, str(folder), advice, code="output.not-writable")
        ) from None
    return [folder / name for name in figures]


_Counters = Sequence[tuple[str, str]]


def _comparison(pairs: Sequence[CompilePair], counters: _Counters) -> Any:
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


def _grouped(pairs: Sequence[CompilePair], counters: _Counters) -> Any:
    """Draw one panel per counter with two bars per pair, labelled with compiled over eager."""
    size = (max(6.0, 1.1 * len(pairs) + 2), 3.2 * len(counters))
    figure, axes = _panels(len(counters), 1, size, sharex=True)
    for panel, (metric, label) in zip(axes[:, 0], counters, strict=True):
        for shift, (name, color) in zip((-0.2, 0.2), _COLORS.items(), strict=True):
            heights = [vars(pair)[name].means.get(metric) for pair in pairs]
            present = [
                (i + shift, height) for i, height in enumerate(heights) if height is not None
            ]
            bars = panel.bar(*zip(*present, strict=True), width=0.4, color=color, label=name)
            if name == "compiled":
                ratios = [pairs[round(at - shift)].ratio(metric) for at, _ in present]
                labels = ["" if ratio is None else f"× {ratio:.2f}" for ratio in ratios]
                panel.bar_label(bars, labels, padding=2, fontsize="small")
        panel.set_xticks(range(len(pairs)), [p.name for p in pairs], rotation=30, ha="right")
        _from_zero(panel, label)
    return _titled(figure, f"torch.compile, each pair: {_MEANS_NOTE}", axes[0, 0], columns=2)


def _before_after(pairs: Sequence[CompilePair], counters: _Counters) -> Any:
    """Draw one panel per counter with a line from eager to compiled for each pair."""
    figure, axes = _panels(1, len(counters), (4.5 * len(counters), 5))
    colors = colormaps["tab10" if len(pairs) <= 10 else "tab20"]
    for panel, (metric, label) in zip(axes[0], counters, strict=True):
        for index, pair in enumerate(pairs):
            heights = [side.means.get(metric, nan) for side in (pair.eager, pair.compiled)]
            line = {"color": colors(index % colors.N), "marker": "os^Dv"[index % 5]}
            panel.plot((0, 1), heights, label=pair.name, **line)
        panel.set_xticks((0, 1), [*_COLORS])
        panel.set_xlim(-0.3, 1.3)
        _from_zero(panel, label)
    title = f"torch.compile, before and after: {_MEANS_NOTE}"
    return _titled(figure, title, axes[0, 0], columns=2 * len(counters))


def _spotlight(pair: CompilePair, counters: _Counters) -> Any:
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
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


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
