"""What torch.compile did to speed and memory: pairs of runs alike but for it."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from lib.errors import ConfigError, Problem
from lib.files import indented_json
from lib.queries.contract import RunName, Source, find, runs_of, series

SCHEMA_VERSION = 1
# What is compared: metric and label.
COUNTERS = (
    ("tokens_per_second", "tokens per second"),
    ("gpu/compute_util_avg", "GPU compute (%)"),
    ("gpu/memory_used_avg_gb", "GPU memory (GB)"),
)
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
    """One run's means after the first log interval; a metric that has no later one is absent."""

    run: str
    means: Mapping[str, float]
    # (step, value) of each metric of COUNTERS.
    curves: Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Pair:
    """Two runs alike but for torch.compile."""

    # The step's, or where several have that, the compiled run's.
    name: str
    eager: Side
    compiled: Side

    def ratio(self, metric: str) -> float | None:
        """Compiled over eager; None where one of them has no such metric, or nothing of it."""
        before, after = self.eager.means.get(metric), self.compiled.means.get(metric)
        return after / before if before and after else None


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
    runs = [_candidate(source, run) for run in runs_of(source, project)]
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
    times = Counter(pair.name for pair in pairs)
    pairs = [p if times[p.name] == 1 else replace(p, name=p.compiled.run) for p in pairs]
    return sorted(pairs, key=lambda pair: pair.name)


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
    return indented_json(document)


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
    later = {m: [v for _, v in points[1:]] for m, points in curves.items()}
    return Side(run.name, {m: fmean(values) for m, values in later.items() if values}, curves)
