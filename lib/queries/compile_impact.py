"""Effect of torch.compile on speed and memory, from pairs of otherwise identical runs."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from lib.errors import ConfigError, Problem
from lib.files import indented_json
from lib.queries.contract import RunName, Source, find, runs_of, series

SCHEMA_VERSION = 1
# Compared counters: (metric, label).
COUNTERS = (
    ("tokens_per_second", "tokens per second"),
    ("gpu/compute_util_avg", "GPU compute (%)"),
    ("gpu/memory_used_avg_gb", "GPU memory (GB)"),
)
# Configuration keys that may differ within a pair: compilation, names, and derived values.
_PAIR_SPECIFIC = {
    "COMPILE",
    "COMPILE_EAGER_TWIN",
    "compile_model",
    "run_name",
    "hash8",
    "manifest_sha256",
    "TRACKER_RUN_NAME",
    "WARMUP_ITERATIONS",
}
_MAX_NAMES_SHOWN = 6


@dataclass(frozen=True)
class Side:
    """Means of one run after the first log interval; metrics without later intervals are absent."""

    run: str
    means: Mapping[str, float]
    # (step, value) of each metric of COUNTERS.
    curves: Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Pair:
    """Two runs that differ only in torch.compile."""

    # Name of the step, or of the compiled run if several pairs share the step.
    name: str
    eager: Side
    compiled: Side

    def ratio(self, metric: str) -> float | None:
        """Return compiled over eager; None if either value is missing or zero."""
        before, after = self.eager.means.get(metric), self.compiled.means.get(metric)
        return after / before if before and after else None


@dataclass(frozen=True)
class _Candidate:
    """A run that may be one side of a pair; ``rest`` must be equal on both sides."""

    name: RunName
    compiled: bool
    step: str
    rest: Mapping[str, Any]


def read_pairs(source: Source, project: str, named: Sequence[str] = ()) -> list[Pair]:
    """Return the pairs of ``project``, or only the pairs that contain a run in ``named``.

    Raises ConfigError if there is no pair, if a run does not record whether it was compiled, or if
    several runs qualify as the same side.
    """
    requested = {find(source, project, name).id for name in named}
    runs = [_candidate(source, run) for run in runs_of(source, project)]
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
            Problem(what, next="type: make try SET=COMPILE=y", code="run.no-compile-pair")
        )
    counts = Counter(pair.name for pair in pairs)
    pairs = [p if counts[p.name] == 1 else replace(p, name=p.compiled.run) for p in pairs]
    return sorted(pairs, key=lambda pair: pair.name)


def impact_to_text(pairs: Sequence[Pair]) -> str:
    """Return one line per pair and counter."""
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
    """Return the pairs as one JSON document with sorted keys."""
    rows = [
        {"name": pair.name, "eager": _plain(pair.eager), "compiled": _plain(pair.compiled)}
        for pair in pairs
    ]
    document = {"schema_version": SCHEMA_VERSION, "pairs": rows}
    return indented_json(document)


def _plain(side: Side) -> dict[str, Any]:
    return {"run": side.run, "means": dict(side.means)}


def _candidate(source: Source, run: RunName) -> _Candidate:
    config = source.config(run)
    if "compile_model" not in config:
        what = f"{run.name} has no compile_model in its configuration"
        raise ConfigError(Problem(what, code="run.missing-setting"))
    # If the configuration lists all symbols, the step is only a name for some of them.
    pair_specific = _PAIR_SPECIFIC | ({"step"} if "COMPILE" in config else set())
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
    names = _differing(a, b)
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return (
        f": {a.name.name} and {b.name.name} differ in {', '.join(names[:_MAX_NAMES_SHOWN])}{more}"
    )


def _differing(a: _Candidate, b: _Candidate) -> list[str]:
    missing = object()
    names = sorted(a.rest.keys() | b.rest.keys())
    return [n for n in names if a.rest.get(n, missing) != b.rest.get(n, missing)]


def _pair(source: Source, members: Sequence[_Candidate], requested: Set[str]) -> Pair:
    eager, compiled = (_side_of(members, is_compiled, requested) for is_compiled in (False, True))
    return Pair(compiled.step, _side(source, eager.name), _side(source, compiled.name))


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


def _side(source: Source, run: RunName) -> Side:
    history = source.history(run)
    curves = {metric: series(history, metric) for metric, _ in COUNTERS}
    # The first interval contains compilation and allocator growth.
    later = {m: [v for _, v in points[1:]] for m, points in curves.items()}
    return Side(run.name, {m: fmean(values) for m, values in later.items() if values}, curves)
