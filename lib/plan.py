"""The list of runs. A study, a test matrix and one training are all ways to make it.

A plan is blocks of configurations, one block for each seed: every variant is trained once before
any is trained a second time, so that a study that is stopped early is still a comparison.
"""

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lib.binding import Value
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer, Tree

# A longer range is a typing error.
_MOST_SEEDS = 1000


class RunConfig(Protocol):
    """What the planner and the runner may ask of a run's configuration."""

    @property
    def hash8(self) -> str:
        """Eight hex digits that differ where the configuration may change a result."""

    def identity(self) -> dict[str, Any]:
        """All that may change a bit of the result."""


C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class Variant:
    """One row of a comparison, before seeds: what it is called and how it differs."""

    slug: str
    title: str = ""
    # Place in its study; None where there is only one.
    number: int | None = None
    # Slug of the variant that ``delta`` changes; "" for a baseline.
    parent: str = ""
    delta: Mapping[str, Value] | None = None


@dataclass(frozen=True)
class Run(Generic[C]):
    """One training: a variant, a seed, its configuration, and the directory that holds it."""

    study: str
    variant: Variant
    seed: int
    config: C
    path: Path

    @property
    def label(self) -> str:
        """How output names the run: ``ratio/07-ra-golden-mech s2``."""
        number = "" if self.variant.number is None else f"{self.variant.number:02d}-"
        return f"{self.study}/{number}{self.variant.slug} s{self.seed}"

    def matches(self, pattern: str) -> bool:
        """Whether a shell pattern names the run: by slug, number, label or directory."""
        number = "" if self.variant.number is None else str(self.variant.number)
        names = (self.variant.slug, number, self.label, self.label.split()[0], self.path.name)
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def plan_runs(
    study: str, folder: Path, blocks: Mapping[int, Sequence[tuple[Variant, C]]]
) -> list[Run[C]]:
    """One run for each variant of each seed's block, in that order, below ``folder / study``.

    Raises ConfigError when two runs would be the same: the same variant, or another name for it.
    """
    runs = [
        Run(study, variant, seed, config, run_path(folder / study, variant.slug, seed, config))
        for seed, block in blocks.items()
        for variant, config in block
    ]
    problems = []
    first: dict[tuple[int, str], Run[C]] = {}
    for run in runs:
        twin = first.setdefault((run.seed, run.config.hash8), run)
        if twin is not run:
            problems.append(Problem(f"{run.label} is the same run as {twin.label}"))
    if problems:
        raise ConfigError(*problems)
    return runs


def run_path(folder: Path, slug: str, seed: int, config: RunConfig) -> Path:
    """``<slug>-s<seed>-<hash8>``: another configuration is another directory."""
    return folder / f"{slug}-s{seed}-{config.hash8}"


def parse_seeds(text: str) -> tuple[int, ...]:
    """``1,2,3`` or ``1-3``. ConfigError on anything else and on a seed that stands twice."""
    seeds: list[int] = []
    for word in text.replace(",", " ").split():
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not 0 <= last - first < _MOST_SEEDS:
            raise ConfigError(Problem(f"{word!r} is neither a seed nor a short range", "SEEDS"))
        seeds += range(first, last + 1)
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice:
        raise ConfigError(Problem(f"{twice[0]} stands twice", "SEEDS"))
    return tuple(seeds)


@dataclass(frozen=True)
class Matrix:
    """The combinations of a test matrix that Kconfig allows, and why the others are left out."""

    variants: Sequence[Variant]
    left_out: Sequence[Problem]


def plan_matrix(tree: Tree, base: Sequence[Layer], axes: str) -> Matrix:
    """The cross product of ``NAME=value,value NAME=…``; a name is a symbol or a choice.

    A value that fits in no combination at all is a ConfigError, with its reason.
    """
    parsed = [_parse_axis(tree, word) for word in axes.split()]
    _check_axes(parsed)
    variants, left_out, refused = [], [], []
    fitting: set[tuple[str, str]] = set()
    for number, points in enumerate(itertools.product(*(axis.points for axis in parsed))):
        delta = {name: value for point in points for name, value in point.delta.items()}
        slug = "-".join(point.slug for point in points)
        try:
            tree.resolve([*base, Layer.of("axis", f"TEST_MATRIX_AXES {slug}", delta)])
        except ConfigError as error:
            left_out.append(Problem(f"{slug}: {error.problems[0].what}"))
            refused.append((points, error))
            continue
        fitting |= {(axis.name, point.slug) for axis, point in zip(parsed, points, strict=True)}
        title = " ".join(f"{n}={p.text}" for n, p in zip((a.name for a in parsed), points))
        variants.append(Variant(slug, title, number, delta=delta))
    never: dict[tuple[str, str], Sequence[Problem]] = {}
    for points, error in refused:
        for axis, point in zip(parsed, points, strict=True):
            if (axis.name, point.slug) not in fitting:
                never.setdefault((axis.name, point.slug), error.problems)
    if never:
        raise ConfigError(*dict.fromkeys(p for found in never.values() for p in found))
    return Matrix(variants, left_out)


@dataclass(frozen=True)
class _Point:
    """One value of one axis."""

    text: str
    slug: str
    delta: Mapping[str, Value]


@dataclass(frozen=True)
class _Axis:
    name: str
    points: Sequence[_Point]


def _parse_axis(tree: Tree, word: str) -> _Axis:
    name, equals, listed = word.partition("=")
    name = name.removeprefix("CONFIG_")
    values = listed.split(",")
    where = "TEST_MATRIX_AXES"
    if not equals or "" in values:
        raise ConfigError(Problem(f"{word!r} is not NAME=value,value", where))
    if name == "SEED":
        raise ConfigError(Problem("SEED is no axis", where, "type: make SEEDS=1,2,3"))
    info = next((found for found in tree.symbols() if found.name == name), None)
    if info is None:
        raise ConfigError(Problem(f"{name}: no such symbol or choice that can be set", where))
    if info.type != "choice":
        return _Axis(name, [_Point(v, _slug(f"{name}-{v}"), {name: v}) for v in values])
    members = {m.removeprefix(f"{name}_").lower(): m for m in info.members}
    unknown = [v for v in values if v not in members]
    if unknown:
        what = f"{name}: {unknown[0]!r} is not one of {', '.join(members)}"
        raise ConfigError(Problem(what, where))
    return _Axis(name, [_Point(v, _slug(v), {members[v]: True}) for v in values])


def _check_axes(axes: Sequence[_Axis]) -> None:
    """Refuse an empty matrix, an axis that stands twice, and values that stand twice."""
    problems = []
    if not axes:
        problems.append("names no axis")
    names = Counter(axis.name for axis in axes)
    problems += [f"{name} stands twice" for name, count in names.items() if count > 1]
    for axis in axes:
        slugs = Counter(point.slug for point in axis.points)
        problems += [f"{axis.name}: {s} stands twice" for s, count in slugs.items() if count > 1]
    if problems:
        raise ConfigError(*(Problem(what, "TEST_MATRIX_AXES") for what in problems))


def _slug(text: str) -> str:
    """Lower case, and hyphens for what a folder's name or a shell would stumble over."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
