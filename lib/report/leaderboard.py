"""Leaderboard of sweep runs, read from the run directories and sorted by validation loss.

Each entry is compared with the one of the lowest loss. That one is selected by its losses, so the
family of the verdicts is every pair of entries: whichever pair is read, its word counts.

Nobody records when the leaderboard is read. So a pair is judged at the planned numbers of seeds only
(``LookPlan.share_of``): it costs nothing to read the same seeds again, and every further number of
seeds has its part of alpha.

A sweep reuses runs that another study has already trained; ``REUSED_RUNS_FILE`` lists the paths
of these runs.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lib.config.field import SymbolValue
from lib.errors import ConfigError, Problem
from lib.files import write_atomic
from lib.json_files import MissingRecord, RecordError, read_text
from lib.plan.run import run_key
from lib.report.contrast_tests import ErrorLevel, VerdictRule
from lib.report.contrasts import Contrast
from lib.report.looks import LookPlan, LookSchedule
from lib.report.run_facts import RunFacts, observed_differences, read_run_facts
from lib.report.run_results import finished_outcome, missing_outcome
from lib.report.table import SampleStats
from lib.report.verdicts import ContrastVerdict, SeedOutcome, judge
from lib.runs.record import FinalResults, RunRecord
from lib.runs.run_dir import RunDir, State, read_status
from lib.tracking.stability import unstable_steps

REUSED_RUNS_FILE = "elsewhere.txt"
# Runs that differ only in the seed form one entry.
_SEED = "SEED"


@dataclass(frozen=True)
class LeaderboardEntry:
    """One combination of settings over its seeds. The loss is in nats per token."""

    val_loss: SampleStats
    # The symbols in which the sweep's runs differ.
    settings: Mapping[str, SymbolValue]
    parameters: int
    tokens: int
    # Mean over the seeds.
    train_seconds: float
    # Directories of the runs.
    runs: Sequence[str]
    outcomes: Sequence[SeedOutcome]
    # Against the reference; None for the reference itself.
    verdict: ContrastVerdict | None = None

    @property
    def diverged(self) -> bool:
        """Return whether a seed diverged: the mean over the others is then no result."""
        return any(outcome.diverged for outcome in self.outcomes)


@dataclass(frozen=True)
class Leaderboard:
    """Entries sorted by loss, and the runs left out, each with the reason."""

    entries: Sequence[LeaderboardEntry]
    left_out: Sequence[str]


@dataclass(frozen=True)
class _FinishedRun:
    facts: RunFacts
    final: FinalResults
    seconds: float
    outcome: SeedOutcome

    @property
    def name(self) -> str:
        return self.facts.run.path.name

    @property
    def symbols(self) -> Mapping[str, SymbolValue]:
        return self.facts.symbols


@dataclass(frozen=True)
class _DivergedRun:
    """A run that failed because a value was not finite."""

    symbols: Mapping[str, SymbolValue]
    outcome: SeedOutcome


def record_reused_runs(folder: Path, runs: Sequence[Path]) -> None:
    """Add the ``runs`` outside ``folder`` to the folder's list of reused runs."""
    outside = [os.path.relpath(run, folder) for run in runs if run.parent != folder]
    listed = _elsewhere(folder)
    if missing := [path for path in outside if path not in listed]:
        write_atomic(
            folder / REUSED_RUNS_FILE, "".join(f"{path}\n" for path in [*listed, *missing])
        )


def read_leaderboard(
    folder: Path,
    looks: LookPlan,
    ignored: Sequence[str] = (),
    rule: VerdictRule | None = None,
) -> Leaderboard:
    """Compare the finished runs of ``folder`` and the runs it reuses from other studies.

    ``looks`` are the numbers of seeds at which pairs are judged. Symbols in ``ignored`` do not
    separate entries. Unfinished runs, and runs that differ from the
    majority in an observed fact or in code, are left out with the reason. Raises ConfigError if
    there is no finished run.
    """
    finished, diverged, left_out = [], [], []
    for path in _runs(folder):
        run = _read(RunDir(path))
        if isinstance(run, str):
            left_out.append(f"{path.name}: {run}")
        elif isinstance(run, _DivergedRun):
            diverged.append(run)
            left_out.append(f"{path.name}: diverged")
        else:
            finished.append(run)
    if not finished:
        raise ConfigError(
            Problem(
                "no finished run to compare",
                str(folder),
                'type: make SWEEP="LEARNING_RATE=1e-4,3e-4"',
                code="run.not-finished",
            )
        )
    comparable, excluded = _split_comparable(finished)
    left_out += excluded
    entries = _entries(comparable, diverged, ignored)
    entries.sort(key=lambda entry: (entry.diverged, entry.val_loss.mean))
    return Leaderboard(_with_verdicts(entries, rule or VerdictRule(), looks), left_out)


def _with_verdicts(
    entries: Sequence[LeaderboardEntry], rule: VerdictRule, looks: LookPlan
) -> list[LeaderboardEntry]:
    """Return the entries with verdicts against the lowest one that has enough seeds, if any."""
    pairs = len(entries) * (len(entries) - 1) // 2
    if rule.variance == "factorial":
        # Combinations of several sweeps do not form a design.
        rule = replace(rule, variance="shared")
    enough = [
        i
        for i, entry in enumerate(entries)
        if entry.val_loss.n >= rule.min_seeds and not entry.diverged
    ]
    reference = (enough or [0])[0]
    names = [entry.runs[0].rsplit("-", 2)[0] for entry in entries]
    names = [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]
    others = [i for i in range(len(entries)) if i != reference]
    contrasts = [Contrast.pair(names[i], names[reference], "lowest") for i in others]
    outcomes = {name: entry.outcomes for name, entry in zip(names, entries, strict=True)}
    judged = partial(judge, contrasts, outcomes, rule, pairs)
    between = judged(None)
    shares = {n: share for n in {v.n for v in between} if (share := looks.share_of(n))}
    share_at = LookSchedule(looks).share_at
    at_look = {n: judged(ErrorLevel(share, share_at=share_at)) for n, share in shares.items()}
    verdicts = {
        i: replace(at_look[v.n][k], share=shares[v.n]) if v.n in shares else _waiting(v, looks)
        for k, (i, v) in enumerate(zip(others, between, strict=True))
    }
    return [replace(entry, verdict=verdicts.get(i)) for i, entry in enumerate(entries)]


def _waiting(verdict: ContrastVerdict, looks: LookPlan) -> ContrastVerdict:
    """Return the verdict on a pair between two looks, with the reason why it has no word."""
    if verdict.is_given or verdict.n < verdict.rule.min_seeds:
        return verdict
    return replace(verdict, reason=f"judged at {', '.join(map(str, looks.seeds))} seeds")


def _runs(folder: Path) -> list[Path]:
    """Return the run directories of the folder, and reused runs without a copy in the folder."""
    local = sorted(p for p in folder.glob("*-s*-*") if not RunDir(p).is_replaced)
    identities = {run_key(path) for path in local}
    reused = [folder / path for path in _elsewhere(folder)]
    return local + [path for path in reused if path.exists() and run_key(path) not in identities]


def _elsewhere(folder: Path) -> list[str]:
    try:
        return read_text(folder / REUSED_RUNS_FILE).splitlines()
    except MissingRecord:
        return []


def _read(run: RunDir) -> _FinishedRun | _DivergedRun | str:
    """Return the finished or diverged run, or the reason that the run cannot be compared."""
    status = read_status(run)
    if status is None:
        return "new"
    try:
        if status.state is not State.SUCCESS:
            state = status.state.word
            outcome = missing_outcome(0, run, state, status.message)
            if not outcome.diverged:
                return state
            symbols = RunRecord(run).config.symbols
            return _DivergedRun(symbols, replace(outcome, seed=int(symbols.get(_SEED, 0))))
        facts = read_run_facts(run)
        summary = facts.record.summary
        seed, unstable = int(facts.symbols.get(_SEED, 0)), unstable_steps(facts.record)
        outcome = finished_outcome(seed, facts.record, unstable)
        return _FinishedRun(facts, summary.final, summary.timing.train_seconds, outcome)
    except RecordError as error:
        return f"damaged: {error}"


def _split_comparable(done: Sequence[_FinishedRun]) -> tuple[list[_FinishedRun], list[str]]:
    """Return the largest set of comparable runs, and the reason for each other run."""
    groups = [
        [run for run in done if not observed_differences(candidate.facts, run.facts)]
        for candidate in done
    ]
    # Unknown facts never compare equal, so such a run is not even comparable with itself.
    largest = max(groups, key=len) or [done[0]]
    reference = largest[0]
    excluded = []
    for run in done:
        if run not in largest:
            reason = "; ".join(map(str, observed_differences(reference.facts, run.facts)))
            excluded.append(f"{run.name}: not comparable: {reason}")
    return largest, excluded


def _entries(
    done: Sequence[_FinishedRun], diverged: Sequence[_DivergedRun], ignored: Sequence[str]
) -> list[LeaderboardEntry]:
    names = [name for run in done for name in run.symbols if name not in (*ignored, _SEED)]
    differing = [n for n in dict.fromkeys(names) if len({run.symbols.get(n) for run in done}) > 1]
    groups: dict[tuple, list[_FinishedRun]] = {}
    for run in done:
        groups.setdefault(tuple(run.symbols.get(n) for n in differing), []).append(run)
    failed: dict[tuple, list[SeedOutcome]] = {}
    for lost in diverged:
        failed.setdefault(tuple(lost.symbols.get(n) for n in differing), []).append(lost.outcome)
    return [
        _entry(dict(zip(differing, values, strict=True)), group, failed.get(values, []))
        for values, group in groups.items()
    ]


def _entry(
    settings: Mapping[str, SymbolValue],
    group: Sequence[_FinishedRun],
    diverged: Sequence[SeedOutcome],
) -> LeaderboardEntry:
    loss = SampleStats.of([run.final.val_loss for run in group])
    assert loss is not None
    first = group[0].final
    return LeaderboardEntry(
        val_loss=loss,
        settings=settings,
        parameters=first.parameters,
        tokens=first.tokens,
        train_seconds=sum(run.seconds for run in group) / len(group),
        runs=[run.name for run in group],
        outcomes=[*(run.outcome for run in group), *diverged],
    )
