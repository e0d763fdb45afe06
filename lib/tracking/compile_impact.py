"""Effect of torch.compile on speed and memory, from pairs of otherwise identical runs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
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
_MEANS_NOTE = "means without the first log interval"
DPI = 300


@dataclass(frozen=True)
class _Candidate:
    """A run that may be one side of a pair; ``rest`` must be equal on both sides."""

    run: RunRef
    compiled: bool
    step: str
    rest: Mapping[str, Any]


@dataclass(frozen=True)
class CompilePair:
    """Two runs that differ only in torch.compile; the fields are dicts by side, eager or compiled."""

    # Name of the step, or of the compiled run if several pairs share the step.
    name: str
    runs: Mapping[str, str]
    # (step, value) of each counter.
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]

    def mean(self, side: str, metric: str) -> float | None:
        """Return the mean after the first log interval, which contains compilation and allocator
        growth; None without later intervals.
        """
        later = [value for _, value in self.curves[side][metric][1:]]
        return fmean(later) if later else None

    def ratio(self, metric: str) -> float | None:
        """Return compiled over eager; None if either value is missing or zero."""
        before, after = (self.mean(side, metric) for side in _SIDES)
        return after / before if before and after else None


def read_compile_pairs(
    source: RunSource, project: str, named: Sequence[str] = ()
) -> list[CompilePair]:
    """Return the pairs of ``project``, or only the pairs that contain a run in ``named``.

    Raises ConfigError if there is no pair, if a run does not record whether it was compiled, or if
    several runs qualify as the same side.
    """
    requested = {find_run(source, project, name).id for name in named}
    candidates = [_candidate(source, run) for run in list_runs(source, project)]
    groups: dict[str, list[_Candidate]] = {}
    for each in candidates:
        key = repr(sorted((name, repr(value)) for name, value in each.rest.items()))
        groups.setdefault(key, []).append(each)
    pairs = [
        _pair(source, members, requested)
        for members in groups.values()
        if {each.compiled for each in members} == {True, False}
        and (not requested or requested & {each.run.id for each in members})
    ]
    if not pairs:
        some = [each for each in candidates if each.run.id in requested] or candidates
        what = f"no two runs differ only in torch.compile{_nearest(some, candidates)}"
        advice = 'type: make SWEEP="COMPILE=n,y"'
        raise ConfigError(Problem(what, next=advice, code="run.no-compile-pair"))
    counts = Counter(pair.name for pair in pairs)
    pairs = [p if counts[p.name] == 1 else replace(p, name=p.runs["compiled"]) for p in pairs]
    return sorted(pairs, key=lambda pair: pair.name)


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


def _nearest(some: Sequence[_Candidate], all_runs: Sequence[_Candidate]) -> str:
    """Return a text with the two runs that differ in the fewest settings, or that all runs are
    compiled, or all eager.
    """
    missing = object()

    def differing(pair: tuple[_Candidate, _Candidate]) -> list[str]:
        a, b = (each.rest for each in pair)
        return [n for n in sorted(a.keys() | b.keys()) if a.get(n, missing) != b.get(n, missing)]

    both = [(a, b) for a in some for b in all_runs if a.compiled is not b.compiled]
    if not both:
        return ": all runs are " + ("compiled" if some and some[0].compiled else "eager")
    nearest = min(both, key=lambda pair: len(differing(pair)))
    names = " and ".join(each.run.name for each in nearest)
    return f": {names} differ in {first_of(differing(nearest), 6)}"


def _pair(source: RunSource, members: Sequence[_Candidate], requested: Set[str]) -> CompilePair:
    """Return the pair of ``members``; of several runs of a side, the requested one."""
    sides: dict[str, _Candidate] = {}
    for side in _SIDES:
        runs = [each for each in members if each.compiled == (side == "compiled")]
        runs = [each for each in runs if each.run.id in requested] or runs
        if len(runs) > 1:
            names = ", ".join(f"{each.run.name} ({each.run.id})" for each in runs)
            what = f"several runs with identical settings: {names}"
            advice = "select one: --run-name NAME, or ID"
            raise ConfigError(Problem(what, next=advice, code="run.ambiguous"))
        sides[side] = runs[0]
    curves = {}
    for side, each in sides.items():
        history = source.history(each.run)
        curves[side] = {metric: metric_series(history, metric) for metric in COUNTERS}
    names_by_side = {side: each.run.name for side, each in sides.items()}
    return CompilePair(sides["compiled"].step, names_by_side, curves)


def compile_pairs_to_text(pairs: Sequence[CompilePair]) -> str:
    lines = []
    for pair in pairs:
        for metric, label in COUNTERS.items():
            if (ratio := pair.ratio(metric)) is not None:
                means = "  ".join(f"{side} {pair.mean(side, metric):,.2f}" for side in _SIDES)
                lines.append(f"{pair.name}  {label}  {means}  ratio {ratio:.3f}")
    return "\n".join(lines) + "\n"


def compile_pairs_to_json(pairs: Sequence[CompilePair]) -> str:
    rows = []
    for pair in pairs:
        row: dict[str, Any] = {"name": pair.name}
        for side in _SIDES:
            means = {m: mean for m in COUNTERS if (mean := pair.mean(side, m)) is not None}
            row[side] = {"run": pair.runs[side], "means": means}
        rows.append(row)
    return json_document(SCHEMA_VERSION, {"pairs": rows})


def plot_compile_impact(pairs: Sequence[CompilePair], folder: Path) -> list[Path]:
    """Write three figures over all pairs and one figure per pair; return their paths.

    Raises ConfigError if no pair has a counter to compare, PreflightError if the folder is not
    writable.
    """
    counters = [m for m in COUNTERS if any(pair.ratio(m) is not None for pair in pairs)]
    if not counters:
        what = f"no pair of runs has more than one log interval with one of {', '.join(COUNTERS)}"
        advice = "train for longer, or with a shorter LOG_INTERVAL"
        raise ConfigError(Problem(what, next=advice, code="run.missing-metric"))
    figures = {
        "torch_compile_comparison.png": _comparison(pairs, counters),
        "torch_compile_grouped.png": _grouped(pairs, counters),
        "torch_compile_before_after.png": _before_after(pairs, counters),
        **{
            f"{pair.runs['compiled']}_vs_baseline.png": _spotlight(pair, counters) for pair in pairs
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=DPI, bbox_inches="tight")
    except OSError as error:
        what, advice = f"cannot write: {error.strerror}", "choose another folder: --out DIR"
        problem = Problem(what, str(folder), advice, code="output.not-writable")
        raise PreflightError(problem) from None
    return [folder / name for name in figures]


def _comparison(pairs: Sequence[CompilePair], counters: Sequence[str]) -> Any:
    """Draw one panel per counter with the mean over all pairs, eager beside compiled."""
    figure = Figure(figsize=(4 * len(counters), 4), layout="constrained")
    for metric, panel in _panels(figure, counters, columns=len(counters)):
        ratios = {pair.name: pair.ratio(metric) for pair in pairs}
        both = [pair for pair in pairs if ratios[pair.name] is not None]
        means = [fmean(pair.mean(side, metric) or nan for pair in both) for side in _SIDES]
        bars = panel.bar([*_SIDES], means, color=[*_SIDES.values()])
        panel.bar_label(bars, fmt="{:,.4g}", padding=2)
        factor = geometric_mean(ratios[pair.name] or nan for pair in both)
        number = f"{len(both)} pair" + "s" * (len(both) > 1)
        panel.set_title(f"× {factor:.3f}, geometric mean of {number}", fontsize="medium")
    figure.suptitle(f"torch.compile over all pairs: {_MEANS_NOTE}", fontsize="medium")
    return figure


def _grouped(pairs: Sequence[CompilePair], counters: Sequence[str]) -> Any:
    """Draw one panel per counter with two bars per pair, labelled with compiled over eager."""
    size = (max(6.0, 1.1 * len(pairs) + 2), 3.2 * len(counters))
    figure = Figure(figsize=size, layout="constrained")
    for metric, panel in _panels(figure, counters, sharex=True):
        for shift, (side, color) in zip((-0.2, 0.2), _SIDES.items(), strict=True):
            heights = [pair.mean(side, metric) for pair in pairs]
            at = [i + shift for i, height in enumerate(heights) if height is not None]
            present = [height for height in heights if height is not None]
            bars = panel.bar(at, present, width=0.4, color=color, label=side)
            if side == "compiled":
                ratios = [pairs[round(x - shift)].ratio(metric) for x in at]
                labels = ["" if ratio is None else f"× {ratio:.2f}" for ratio in ratios]
                panel.bar_label(bars, labels, padding=2, fontsize="small")
        panel.set_xticks(range(len(pairs)), [p.name for p in pairs], rotation=30, ha="right")
    return _with_legend(figure, f"torch.compile, each pair: {_MEANS_NOTE}", columns=2)


def _before_after(pairs: Sequence[CompilePair], counters: Sequence[str]) -> Any:
    """Draw one panel per counter with a line from eager to compiled for each pair."""
    figure = Figure(figsize=(4.5 * len(counters), 5), layout="constrained")
    colors = colormaps["tab10" if len(pairs) <= 10 else "tab20"]
    for metric, panel in _panels(figure, counters, columns=len(counters)):
        for index, pair in enumerate(pairs):
            means = [pair.mean(side, metric) for side in _SIDES]
            heights = [nan if mean is None else mean for mean in means]
            line = {"color": colors(index % colors.N), "marker": "os^Dv"[index % 5]}
            panel.plot((0, 1), heights, label=pair.name, **line)
        panel.set_xticks((0, 1), [*_SIDES])
        panel.set_xlim(-0.3, 1.3)
    title = f"torch.compile, before and after: {_MEANS_NOTE}"
    return _with_legend(figure, title, columns=2 * len(counters))


def _spotlight(pair: CompilePair, counters: Sequence[str]) -> Any:
    """Draw one panel per counter with both runs over iterations, first interval included."""
    figure = Figure(figsize=(7, 0.8 + 2.6 * len(counters)), layout="constrained")
    for metric, panel in _panels(figure, counters, sharex=True):
        for side, color in _SIDES.items():
            if curve := pair.curves[side][metric]:
                label = f"{side}: {pair.runs[side]}"
                panel.plot(*zip(*curve, strict=True), color=color, marker=".", label=label)
        if (ratio := pair.ratio(metric)) is not None:
            panel.set_title(f"× {ratio:.3f}: {_MEANS_NOTE}", fontsize="small")
        panel.grid(alpha=0.3)
    figure.axes[-1].set_xlabel("iteration")
    return _with_legend(figure, f"{pair.name}: compiled against eager", columns=1)


def _panels(
    figure: Any, counters: Sequence[str], columns: int = 1, **more: Any
) -> Iterator[tuple[str, Any]]:
    """Yield a panel to draw each counter into, in a row or a column of ``figure``.

    The y-axis starts at zero so that bar lengths compare, and leaves room for labels.
    """
    axes = figure.subplots(len(counters) // columns, columns, squeeze=False, **more)
    for metric, panel in zip(counters, axes.flat, strict=True):
        yield metric, panel
        panel.set_ylim(0, 1.15 * panel.dataLim.y1)
        panel.set_ylabel(COUNTERS[metric])


def _with_legend(figure: Any, title: str, columns: int) -> Any:
    """Add a title, and below the panels the legend of the first."""
    figure.suptitle(title, fontsize="medium")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": columns, "fontsize": "small"}
    figure.legend(handles, labels, frameon=False, **place)
    return figure
