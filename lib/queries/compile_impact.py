"""What torch.compile did to speed and memory: pairs of runs alike but for it, as figures."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lib.errors import ConfigError, Problem
from lib.figures import pyplot
from lib.queries.contract import RunName, Source, find, series

SCHEMA_VERSION = 1
DPI = 300
# What is compared: metric and label.
COUNTERS = (
    ("tokens_per_second", "tokens per second"),
    ("gpu/compute_util_avg", "GPU compute (%)"),
    ("gpu/memory_used_avg_gb", "GPU memory (GB)"),
)
_EAGER, _COMPILED = "#8c8c8c", "#1f77b4"
# What may differ between the two of a pair: compilation, names, and what follows from them.
_OWN = {
    "COMPILE",
    "COMPILE_EAGER_TWIN",
    "compile_model",
    "run_name",
    "hash8",
    "manifest_sha256",
    "TRACKER_RUN_NAME",
    "WARMUP_ITERATIONS",
}
_NAMED = 6


@dataclass(frozen=True)
class Side:
    """One run's means; a metric that it does not have is absent."""

    run: str
    means: Mapping[str, float]
    # (step, value) of each metric of COUNTERS.
    curves: Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Pair:
    """Two runs alike but for torch.compile."""

    name: str
    eager: Side
    compiled: Side

    def ratio(self, metric: str) -> float | None:
        """Compiled over eager; None where one of them has no such metric."""
        before, after = self.eager.means.get(metric), self.compiled.means.get(metric)
        return after / before if before and after is not None else None


@dataclass(frozen=True)
class _Candidate:
    """A run that may be a side of a pair; ``rest`` is all that has to be alike."""

    name: RunName
    compiled: bool
    step: str
    rest: Mapping[str, Any]


def read_pairs(source: Source, project: str, named: Sequence[str] = ()) -> list[Pair]:
    """The pairs of ``project``, or those of the runs ``named``, which are chosen among runs alike.

    ConfigError where there is none, where a run does not say whether it was compiled, and where
    more than one run would be the other side.
    """
    wanted = {find(source, project, name).id for name in named}
    names = sorted(source.names(project), key=lambda run: run.name)
    runs = [_candidate(source, run) for run in names]
    sides: dict[str, list[_Candidate]] = {}
    for run in runs:
        sides.setdefault(_key(run.rest), []).append(run)
    pairs = [
        _pair(source, found, wanted)
        for found in sides.values()
        if {run.compiled for run in found} == {True, False}
        and (not wanted or wanted & {run.name.id for run in found})
    ]
    if not pairs:
        of = [run for run in runs if run.name.id in wanted] or runs
        what = f"no two runs are alike but for torch.compile{_nearest(of, runs)}"
        raise ConfigError(Problem(what, next="type: make try SET=COMPILE=y"))
    return sorted(pairs, key=lambda pair: pair.name)


def draw_compile_impact(pairs: Sequence[Pair], folder: Path) -> list[Path]:
    """Three figures of all pairs, and one for each pair; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    counters = [(m, label) for m, label in COUNTERS if any(p.ratio(m) is not None for p in pairs)]
    if not counters:
        names = ", ".join(metric for metric, _ in COUNTERS)
        raise ConfigError(Problem(f"no pair of runs has one of {names}"))
    drawn = {
        "torch_compile_comparison.png": _comparison(pairs, counters),
        "torch_compile_grouped.png": _grouped(pairs, counters),
        "torch_compile_before_after.png": _before_after(pairs, counters),
        **{f"{pair.compiled.run}_vs_baseline.png": _spotlight(pair, counters) for pair in pairs},
    }
    for name, figure in drawn.items():
        figure.savefig(folder / name, dpi=DPI, bbox_inches="tight")
        pyplot().close(figure)
    return [folder / name for name in drawn]


def impact_to_text(pairs: Sequence[Pair]) -> str:
    """A line for each pair and counter."""
    lines = []
    for pair in pairs:
        for metric, label in COUNTERS:
            if (ratio := pair.ratio(metric)) is not None:
                before, after = pair.eager.means[metric], pair.compiled.means[metric]
                lines.append(
                    f"{pair.name}  {label}  eager {before:,.2f}  compiled {after:,.2f}  "
                    f"ratio {ratio:.3f}"
                )
    return "\n".join(lines) + "\n"


def impact_to_json(pairs: Sequence[Pair]) -> str:
    """One document with sorted keys."""
    rows = [
        {"name": pair.name, "eager": _plain(pair.eager), "compiled": _plain(pair.compiled)}
        for pair in pairs
    ]
    document = {"schema_version": SCHEMA_VERSION, "pairs": rows}
    return json.dumps(document, sort_keys=True, indent=2, allow_nan=False) + "\n"


def _plain(side: Side) -> dict[str, Any]:
    return {"run": side.run, "means": dict(side.means)}


def _candidate(source: Source, run: RunName) -> _Candidate:
    config = source.config(run)
    if "compile_model" not in config:
        raise ConfigError(Problem(f"{run.name} has no compile_model in its configuration"))
    # A step is the symbols that it sets; where they are told, it is one more name.
    own = _OWN | ({"step"} if "COMPILE" in config else set())
    rest = {name: value for name, value in config.items() if name not in own}
    return _Candidate(run, bool(config["compile_model"]), str(config.get("step") or run.name), rest)


def _key(config: Mapping[str, Any]) -> str:
    return repr(sorted((name, repr(value)) for name, value in config.items()))


def _nearest(some: Sequence[_Candidate], all_runs: Sequence[_Candidate]) -> str:
    """The two that differ in the fewest settings, in words; "" where all runs are of one side."""
    both = [(a, b) for a in some for b in all_runs if a.compiled is not b.compiled]
    if not both:
        return ": all of them are " + ("compiled" if some and some[0].compiled else "eager")
    a, b = min(both, key=lambda pair: len(_differing(*pair)))
    names = _differing(a, b)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f": {a.name.name} and {b.name.name} differ in {', '.join(names[:_NAMED])}{more}"


def _differing(a: _Candidate, b: _Candidate) -> list[str]:
    missing = object()
    names = sorted(a.rest.keys() | b.rest.keys())
    return [n for n in names if a.rest.get(n, missing) != b.rest.get(n, missing)]


def _pair(source: Source, found: Sequence[_Candidate], wanted: Set[str]) -> Pair:
    eager, compiled = (_side_of(found, is_it, wanted) for is_it in (False, True))
    return Pair(compiled.step, _side(source, eager.name), _side(source, compiled.name))


def _side_of(found: Sequence[_Candidate], compiled: bool, wanted: Set[str]) -> _Candidate:
    """The one run of a side; of several the one that was asked for."""
    runs = [run for run in found if run.compiled is compiled]
    runs = [run for run in runs if run.name.id in wanted] or runs
    if len(runs) > 1:
        names = ", ".join(f"{run.name.name} ({run.name.id})" for run in runs)
        what = f"runs alike in everything, compilation too: {names}"
        raise ConfigError(Problem(what, next="name one of them: --run-name NAME, or ID"))
    return runs[0]


def _side(source: Source, run: RunName) -> Side:
    history = source.history(run)
    curves = {metric: series(history, metric) for metric, _ in COUNTERS}
    # The first interval holds compilation and the allocator's growth.
    later = {m: [v for _, v in points[1:] or points] for m, points in curves.items()}
    return Side(run.name, {m: fmean(values) for m, values in later.items() if values}, curves)


def _comparison(pairs: Sequence[Pair], counters: Sequence[tuple[str, str]]) -> Any:
    """A panel for each counter: the mean over all pairs, eager beside compiled."""
    figure, axes = pyplot().subplots(
        1, len(counters), figsize=(4 * len(counters), 4), squeeze=False
    )
    for panel, (metric, label) in zip(axes[0], counters, strict=True):
        both = [pair for pair in pairs if pair.ratio(metric) is not None]
        means = [
            fmean(side.means[metric] for side in sides)
            for sides in ([p.eager for p in both], [p.compiled for p in both])
        ]
        bars = panel.bar(("eager", "compiled"), means, color=(_EAGER, _COMPILED))
        panel.bar_label(bars, fmt="{:,.4g}", padding=2)
        panel.set_ylabel(label)
        panel.set_title(
            f"ratio of means {means[1] / means[0]:.3f}, {len(both)} pair(s)", fontsize="medium"
        )
        panel.margins(y=0.15)
    figure.suptitle("torch.compile: means over all pairs")
    figure.tight_layout()
    return figure


def _grouped(pairs: Sequence[Pair], counters: Sequence[tuple[str, str]]) -> Any:
    """A panel for each counter: two bars for each pair."""
    size = (max(6.0, 1.1 * len(pairs) + 2), 3.2 * len(counters))
    figure, axes = pyplot().subplots(len(counters), 1, figsize=size, squeeze=False, sharex=True)
    for panel, (metric, label) in zip(axes[:, 0], counters, strict=True):
        for shift, name, color in ((-0.2, "eager", _EAGER), (0.2, "compiled", _COMPILED)):
            heights = [vars(pair)[name].means.get(metric, 0.0) for pair in pairs]
            places = [i + shift for i in range(len(pairs))]
            panel.bar(places, heights, width=0.4, color=color, label=name)
        panel.set_xticks(range(len(pairs)), [p.name for p in pairs], rotation=30, ha="right")
        panel.set_ylabel(label)
    axes[0, 0].legend()
    figure.suptitle("torch.compile: each pair")
    figure.tight_layout()
    return figure


def _before_after(pairs: Sequence[Pair], counters: Sequence[tuple[str, str]]) -> Any:
    """A panel for each counter: a line from eager to compiled for each pair."""
    figure, axes = pyplot().subplots(
        1, len(counters), figsize=(4 * len(counters), 5), squeeze=False
    )
    for panel, (metric, label) in zip(axes[0], counters, strict=True):
        for pair in pairs:
            if (ratio := pair.ratio(metric)) is None:
                continue
            heights = (pair.eager.means[metric], pair.compiled.means[metric])
            panel.plot((0, 1), heights, marker="o", label=f"{pair.name} ({ratio:.2f})")
        panel.set_xticks((0, 1), ("eager", "compiled"))
        panel.set_xlim(-0.3, 1.3)
        panel.set_ylim(bottom=0)
        panel.set_ylabel(label)
        panel.legend(fontsize="x-small")
    figure.suptitle("torch.compile: before and after")
    figure.tight_layout()
    return figure


def _spotlight(pair: Pair, counters: Sequence[tuple[str, str]]) -> Any:
    """A panel for each counter: both runs over their iterations."""
    size = (7, 2.6 * len(counters))
    figure, axes = pyplot().subplots(len(counters), 1, figsize=size, squeeze=False, sharex=True)
    for panel, (metric, label) in zip(axes[:, 0], counters, strict=True):
        for side, name, color in (
            (pair.eager, "eager", _EAGER),
            (pair.compiled, "compiled", _COMPILED),
        ):
            if side.curves[metric]:
                steps, values = zip(*side.curves[metric], strict=True)
                panel.plot(steps, values, color=color, marker=".", label=f"{name}: {side.run}")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    axes[0, 0].legend(fontsize="x-small")
    axes[-1, 0].set_xlabel("iteration")
    figure.suptitle(f"{pair.name}: compiled against eager")
    figure.tight_layout()
    return figure
