"""The list of runs. A study, a test matrix and one training are all ways to make it.

A plan is blocks of configurations, one block for each seed: every variant is trained once before
any is trained a second time, so that a study that is stopped early is still a comparison.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lib.binding import Value
from lib.errors import ConfigError, Problem
from lib.rundir import RunDir
from lib.status import is_done

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
    # Factor → level, in a design whose factors can be told apart.
    levels: Mapping[str, str] | None = None
    # What sets it apart from the other half of a plan that has two: no table compares across it.
    arm: str = ""


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
        """Whether a shell pattern names the run: by slug, number or directory.

        One with a slash is for the label: ``ra*`` means no run that is in ``ratio`` only.
        """
        number = "" if self.variant.number is None else str(self.variant.number)
        labels = (self.label, self.label.split()[0])
        names = labels if "/" in pattern else (self.variant.slug, number, self.path.name)
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def plan_runs(
    study: str, folder: Path, blocks: Mapping[int, Sequence[tuple[Variant, C]]]
) -> list[Run[C]]:
    """One run for each variant of each seed's block, in that order, below ``folder / study``.

    A run that is done below ``folder`` under another name or in another study is taken from there:
    the same configuration and seed are the same run, whatever it is called.
    Raises ConfigError when two runs would be the same: the same variant, or another name for it.
    """
    done = _finished(folder)

    def path(variant: Variant, seed: int, config: C) -> Path:
        own = run_path(folder / study, variant.slug, seed, config)
        return own if own.exists() else done.get(run_identity(own), own)

    runs = [
        Run(study, variant, seed, config, path(variant, seed, config))
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


def own_path(run: Run[Any], folder: Path) -> Path:
    """Where ``run`` lies in its own study's ``folder``, wherever it was found."""
    return run_path(folder, run.variant.slug, run.seed, run.config)


def run_path(folder: Path, slug: str, seed: int, config: RunConfig) -> Path:
    """``<slug>-s<seed>-<hash8>``: another configuration is another directory."""
    return folder / f"{slug}-s{seed}-{config.hash8}"


def run_identity(path: Path) -> str:
    """The end of a run directory's name: ``s<seed>-<hash8>``."""
    return "-".join(path.name.rsplit("-", 2)[1:])


def _finished(folder: Path) -> dict[str, Path]:
    """The runs of all studies that are done, by seed and hash."""
    found = sorted(folder.glob("*/*-s*-*"))
    return {run_identity(path): path for path in found if is_done(RunDir(path))}


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
