"""Planned runs of a study, a test matrix or a single training, and their order.

Every variant is trained with the first seed before any is trained with the second, so that a study
stopped early is still a comparison.
"""

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lib.config.field import WHOLE_NUMBER, SymbolValue
from lib.errors import ConfigError, Problem
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, State
from lib.runs.seeds import stream_seed

# A longer range is assumed to be a typing error.
_MAX_SEEDS = 1000
_SEEDS_EXAMPLE = "type: make SEEDS=1-3"
# Levels of a feature in a design.
ON, OFF = "on", "off"


class RunConfig(Protocol):
    """A configuration, as far as planning and running read it."""

    # The first eight hex digits of the SHA-256 of the identity's canonical JSON.
    @property
    def hash8(self) -> str: ...

    # All settings that may affect a bit of the result.
    def identity(self) -> dict[str, Any]: ...


C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class RunVariant:
    """One row of a comparison, before seeds: its name and its difference from the parent."""

    slug: str
    title: str = ""
    # Number in its study; None if the study has only one variant.
    number: int | None = None
    # Slug of the variant that ``delta`` changes; "" for a baseline.
    parent: str = ""
    delta: Mapping[str, SymbolValue] | None = None
    # Factor → level, if the variant belongs to a factorial design.
    levels: Mapping[str, str] | None = None
    # What an evaluation predicts, if other variants of the plan predict something else: only variants
    # that predict the same are compared.
    text: str = ""
    # Whether the variant is an A/A step: its parent with other initial weights.
    is_aa: bool = False
    # Whether the variant trains its parent's configuration a second time.
    is_repeat: bool = False

    @property
    def is_control(self) -> bool:
        """Return whether the variant tests the study: it is no step, and in no family."""
        return self.is_aa or self.is_repeat


@dataclass(frozen=True)
class Run(Generic[C]):
    """One training run: variant, seed, configuration and run directory."""

    study: str
    variant: RunVariant
    seed: int
    config: C
    path: Path

    @property
    def name(self) -> str:
        """Return the name of its directory, even if the directory of another run is reused."""
        return run_name(self.variant.slug, self.seed, self.config)

    @property
    def label(self) -> str:
        """Return the name in output: ``ratio/07-ra-golden-mech s2``."""
        number = "" if self.variant.number is None else f"{self.variant.number:02d}-"
        return f"{self.study}/{number}{self.variant.slug} s{self.seed}"

    def matches(self, pattern: str) -> bool:
        """Return whether a shell pattern matches the slug, number or directory of the run.

        A pattern with a slash is matched against the label, so that ``ra*`` does not match every
        run of a study called ratio.
        """
        number = "" if self.variant.number is None else str(self.variant.number)
        labels = (self.label, self.label.split()[0])
        names = labels if "/" in pattern else (self.variant.slug, number, self.path.name)
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def build_runs(
    study: str, folder: Path, blocks: Mapping[int, Sequence[tuple[RunVariant, C]]]
) -> list[Run[C]]:
    """Return one run per variant of each seed's block, in that order, below ``folder / study``.

    If a finished run below ``folder`` has the same configuration and seed, its directory is reused,
    regardless of its name and study. A repeat has a directory of its own, which no other run reuses.
    Raises ConfigError if two runs have one name and seed, or two others one configuration and seed.
    """
    home = folder / study
    items = [
        (run_name(variant.slug, seed, config), seed, variant, config)
        for seed, block in blocks.items()
        for variant, config in block
    ]
    repeats = {name for name, _, variant, _ in items if variant.is_repeat}
    present = repeats | _names(home)
    absent = {name: _key(name) for name, *_ in items if name not in present}
    finished = _finished(folder, set(absent.values()), {home / name for name in repeats})
    reused = {name: finished[key] for name, key in absent.items() if key in finished}
    runs = [
        Run(study, variant, seed, config, reused.get(name) or home / name)
        for name, seed, variant, config in items
    ]
    problems = []
    first: dict[tuple[str, bool], Run[C]] = {}
    for run, (name, *_) in zip(runs, items, strict=True):
        other = first.setdefault((_key(name), run.variant.is_repeat), run)
        if other is not run:
            what = f"duplicate run: {run.label} equals {other.label}"
            problems.append(Problem(what, code="run.duplicate"))
    names = Counter((run.variant.slug, run.seed) for run in runs)
    for (slug, seed), count in names.items():
        if count > 1:
            what = f"{count} runs of one name and seed: {study}/{slug} s{seed}"
            problems.append(Problem(what, code="run.duplicate-name"))
    if problems:
        raise ConfigError(*problems)
    return runs


def training_order(runs: Sequence[Run[C]]) -> list[Run[C]]:
    """Return ``runs`` in the order in which they are trained: one block per seed.

    In a block, the baseline is first, a parent stands before its children, a repeat is last, and the
    rest is in a random order, so that a drift of the machine favours no step. The order depends on
    study, seed and slugs alone: it is the same on every machine and after an interruption.
    """
    ordered: list[Run[C]] = []
    drawn = sorted(runs, key=_draw)
    for seed in dict.fromkeys(run.seed for run in runs):
        waiting = {run.variant.slug: run for run in drawn if run.seed == seed}
        while waiting:
            run = next(iter(waiting.values()))
            while run.variant.parent in waiting:
                run = waiting[run.variant.parent]
            ordered.append(waiting.pop(run.variant.slug))
    return ordered


def _draw(run: Run[Any]) -> tuple[bool, bool, int]:
    variant = run.variant
    place = stream_seed(run.seed, f"order/{run.study}/{variant.slug}")
    return variant.is_repeat, bool(variant.parent), place


def run_name(slug: str, seed: int, config: RunConfig) -> str:
    """Return ``<slug>-s<seed>-<hash8>``."""
    return f"{slug}-s{seed}-{config.hash8}"


def _names(folder: Path) -> set[str]:
    """Return the names in ``folder``, without those of links that lead nowhere."""
    try:
        with os.scandir(folder) as entries:
            return {e.name for e in entries if not e.is_symlink() or os.path.exists(e.path)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _key(name: str) -> str:
    """Return the end of the name of a run directory: ``s<seed>-<hash8>``."""
    return "-".join(name.rsplit("-", 2)[1:])


def _finished(folder: Path, keys: Set[str], repeats: Set[Path]) -> dict[str, Path]:
    """Return the finished runs of all studies with one of ``keys``, without ``repeats``.

    A damaged run is returned if no other run has its key: it is refused by name, not trained anew.
    """
    if not keys:
        return {}
    paths = sorted(path for path in folder.glob("*/*-s*-*") if _key(path.name) in keys)
    states = {p: RunRecord(RunDir(p)).state for p in paths if p not in repeats}
    return {
        _key(path.name): path
        for state in (State.DAMAGED.word, State.SUCCESS.word)
        for path in states
        if states[path] == state
    }


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds such as ``1,2,3`` or ``1-3``. Raises ConfigError."""
    seeds: list[int] = []
    for word in text.replace(",", " ").split():
        match = re.fullmatch(rf"({WHOLE_NUMBER.pattern})(?:-({WHOLE_NUMBER.pattern}))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not 0 <= last - first < _MAX_SEEDS:
            what = f"invalid seed {word!r} (expected N or FIRST-LAST, at most {_MAX_SEEDS} seeds)"
            raise ConfigError(Problem(what, "SEEDS", _SEEDS_EXAMPLE, code="usage.invalid-seed"))
        seeds += range(first, last + 1)
    duplicates = [seed for seed, count in Counter(seeds).items() if count > 1]
    if duplicates:
        what = f"duplicate seed {duplicates[0]}"
        raise ConfigError(Problem(what, "SEEDS", _SEEDS_EXAMPLE, code="usage.duplicate-seed"))
    return tuple(seeds)
