"""Comparison of variants over several seeds, with exact significance tests.

Every run is shown. A variant gets no mean if it has too few seeds, a duplicate seed, a seed that
did not finish, identical losses, or a loss no better than the unigram entropy: a mean of such runs
would not estimate anything.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lib.errors import EXIT_DONE, EXIT_NOT_COMPARABLE, ConfigError, Problem
from lib.json_files import RecordError
from lib.report.render import json_document
from lib.report.run_facts import (
    RunFacts,
    field_differences,
    flatten_identity,
    observed_differences,
    read_run_facts,
)
from lib.report.significance import permutation_p, smallest_p, smallest_permutation_p
from lib.report.table import PairedDifference, SampleStats
from lib.runs.record import RecordedConfig, RunRecord
from lib.runs.run_dir import RunDir, State, read_status

# With fewer seeds, the standard deviation is too uncertain to report.
MIN_SEEDS = 3
_NON_FINITE = re.compile(r"\b(nan|inf|infinite|non-?finite|not finite|diverged)\b", re.IGNORECASE)


@dataclass(frozen=True)
class SeedRun:
    """One seed of a variant: its validation loss in nats per token, or the reason for having none."""

    directory: str
    seed: int
    loss: float | None
    state: str
    # Set only for a finished run.
    facts: RunFacts | None
    unigram_entropy: float | None = None


@dataclass(frozen=True)
class SeedGroup:
    """All seeds of one variant."""

    name: str
    seeds: Sequence[SeedRun]
    problems: Sequence[str]
    # None if there are problems.
    loss: SampleStats | None


@dataclass(frozen=True)
class VariantContrast:
    """One variant compared with the first: changed settings, loss difference and p-values."""

    name: str
    against: str
    changes: Sequence[str]
    # Over the seeds that both variants have; None with fewer than two such seeds.
    paired: PairedDifference | None
    paired_smallest_p: float | None
    difference: float
    unpaired_p: float | None
    unpaired_smallest_p: float


@dataclass(frozen=True)
class SignificanceReport:
    """All variants, and a contrast of each valid variant with the first valid one."""

    min_seeds: int
    groups: Sequence[SeedGroup]
    contrasts: Sequence[VariantContrast]
    problems: Sequence[str]

    @property
    def exit_code(self) -> int:
        """Return 0 if every variant is valid and comparable, else 4."""
        refused = self.problems or any(group.problems for group in self.groups)
        return EXIT_NOT_COMPARABLE if refused else EXIT_DONE


def compare_over_seeds(runs: Sequence[RunDir], names: Mapping[str, str]) -> SignificanceReport:
    """Group runs that differ only in their seed, and test each group against the first.

    ``names`` maps setting paths to symbols. Raises ConfigError if ``runs`` is empty or a directory
    does not contain a run.
    """
    if not runs:
        raise ConfigError(
            Problem(
                "no run given",
                "RUNS",
                'type: make significance RUNS="DIR DIR"',
                code="usage.missing-argument",
            )
        )
    grouped: dict[str, list[SeedRun]] = {}
    min_seeds = MIN_SEEDS
    for run in runs:
        config = _recorded_config(run)
        settings = flatten_identity(config.identity)
        seed = settings.pop("seed")
        min_seeds = max(min_seeds, int(config.symbols.get("FINALIST_MIN_SEEDS", 0)))
        key = json.dumps(settings, sort_keys=True)
        grouped.setdefault(key, []).append(_finalist(run, seed))
    groups = [_group(seeds, min_seeds) for seeds in grouped.values()]
    valid = [group for group in groups if not group.problems]
    contrasts, problems = [], []
    for group in valid[1:]:
        if mismatches := _mismatches(valid[0].seeds[0], group.seeds[0]):
            problems.append(f"{group.name} cannot be compared with {valid[0].name}: {mismatches}")
        else:
            contrasts.append(_contrast(valid[0], group, names))
    return SignificanceReport(min_seeds, groups, contrasts, problems)


def _recorded_config(run: RunDir) -> RecordedConfig:
    try:
        return RunRecord(run).config
    except RecordError as error:
        what = f"not a run directory: {error}"
        raise ConfigError(Problem(what, str(run.path), "RUNS=", code="run.not-found")) from None


def _finalist(run: RunDir, seed: int) -> SeedRun:
    status = read_status(run)
    if status is None or status.state is not State.SUCCESS:
        state = "not started" if status is None else status.state.lower()
        message = "" if status is None else status.message.split("\n")[0]
        label = "diverged" if _NON_FINITE.search(message) else state
        reason = f"{label}: {message}" if message else label
        return SeedRun(str(run.path), seed, None, reason, None)
    facts = read_run_facts(run)
    final = facts.record.summary.final
    return SeedRun(str(run.path), seed, final.val_loss, "done", facts, final.unigram_entropy)


def _group(seeds: Sequence[SeedRun], min_seeds: int) -> SeedGroup:
    losses = [s.loss for s in seeds if s.loss is not None]
    problems = [
        f"seed {s.seed} {s.state}; a mean over the other seeds would hide this"
        for s in seeds
        if s.loss is None
    ]
    counts = Counter(s.seed for s in seeds)
    if duplicates := [str(seed) for seed, count in counts.items() if count > 1]:
        problems.append(f"duplicate seed {', '.join(duplicates)}")
    if len(counts) < min_seeds:
        problems.append(f"too few seeds (expected at least {min_seeds}, got n={len(counts)})")
    if len(losses) > 1 and len(set(losses)) == 1:
        problems.append("all losses are identical to the last digit: the seed has no effect")
    for s in seeds:
        if s.loss is not None and s.unigram_entropy is not None and s.loss >= s.unigram_entropy:
            problems.append(
                f"seed {s.seed} is untrained: loss {s.loss:.4f} is not below the unigram entropy "
                f"{s.unigram_entropy:.4f}"
            )
    for s in seeds[1:]:
        if mismatches := _mismatches(seeds[0], s):
            problems.append(
                f"seed {s.seed} cannot be compared with seed {seeds[0].seed}: {mismatches}"
            )
    name = seeds[0].directory.rstrip("/").rsplit("/", 1)[-1].rsplit("-s", 1)[0]
    return SeedGroup(name, seeds, problems, None if problems else SampleStats.of(losses))


def _mismatches(a: SeedRun, b: SeedRun) -> str:
    if a.facts is None or b.facts is None:
        return ""
    return "; ".join(map(str, observed_differences(a.facts, b.facts)))


def _contrast(first: SeedGroup, other: SeedGroup, names: Mapping[str, str]) -> VariantContrast:
    a = {s.seed: s.loss for s in first.seeds if s.loss is not None}
    b = {s.seed: s.loss for s in other.seeds if s.loss is not None}
    common = [seed for seed in a if seed in b]
    facts = first.seeds[0].facts, other.seeds[0].facts
    assert facts[0] is not None and facts[1] is not None and first.loss and other.loss
    changed = [
        d for d in field_differences(facts[0], facts[1], names) if d.field not in ("SEED", "seed")
    ]
    return VariantContrast(
        name=other.name,
        against=first.name,
        changes=[str(difference) for difference in changed],
        paired=(
            PairedDifference.of([b[seed] - a[seed] for seed in common]) if len(common) > 1 else None
        ),
        paired_smallest_p=smallest_p(len(common)) if len(common) > 1 else None,
        difference=other.loss.mean - first.loss.mean,
        unpaired_p=permutation_p(list(a.values()), list(b.values())),
        unpaired_smallest_p=smallest_permutation_p(len(a), len(b)),
    )


SCHEMA_VERSION = 1


def significance_to_text(report: SignificanceReport) -> str:
    """Return the report as text: all losses first, then means, differences and p-values."""
    parts = [_group_text(group) for group in report.groups]
    parts += [_contrast_text(contrast) for contrast in report.contrasts]
    parts += [f"REFUSED  {problem}\n" for problem in report.problems]
    return "\n".join(parts)


def significance_to_json(report: SignificanceReport) -> str:
    """Return the report as one JSON document with sorted keys."""
    groups = [
        {
            "name": group.name,
            "loss": group.loss and asdict(group.loss),
            "problems": list(group.problems),
            "seeds": [
                {"directory": s.directory, "loss": s.loss, "seed": s.seed, "state": s.state}
                for s in group.seeds
            ],
        }
        for group in report.groups
    ]
    document = {
        "min_seeds": report.min_seeds,
        "groups": groups,
        "contrasts": [asdict(contrast) for contrast in report.contrasts],
        "problems": list(report.problems),
        "exit_code": report.exit_code,
    }
    return json_document(SCHEMA_VERSION, document)


def _group_text(group: SeedGroup) -> str:
    values = [
        f"  seed {s.seed:<6} {s.state if s.loss is None else repr(s.loss)}" for s in group.seeds
    ]
    problems = [f"  REFUSED  {problem}" for problem in group.problems]
    lines = [group.name, *values, *problems]
    if group.loss is not None and group.loss.sd is not None:
        lines.append(
            f"  n={group.loss.n}, mean {group.loss.mean:.4f}, sd {group.loss.sd:.4f} nats per token"
        )
    return "\n".join(lines) + "\n"


def _contrast_text(contrast: VariantContrast) -> str:
    lines = [
        f"{contrast.name} against {contrast.against}: {contrast.difference:+.4f} nats per token"
    ]
    lines += [f"  changed    {change}" for change in contrast.changes]
    if contrast.paired is not None:
        lines.append(
            f"  paired     {_p(contrast.paired.p)} by the exact sign-flip test over "
            f"{contrast.paired.n} seeds; smallest possible p={contrast.paired_smallest_p:.2g}"
        )
    lines.append(
        f"  unpaired   {_p(contrast.unpaired_p)} by the exact permutation test; smallest possible "
        f"p={contrast.unpaired_smallest_p:.2g}"
    )
    return "\n".join(lines) + "\n"


def _p(p: float | None) -> str:
    return "p unknown" if p is None else f"p={p:.2g}"
