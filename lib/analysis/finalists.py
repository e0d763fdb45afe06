"""Several seeds of each finalist, held to what a claim needs, and the tests that they allow.

Nothing is left out of what is shown. A variant with too few seeds, a seed twice, a seed that did not
end well, losses that are all the same or no better than an untrained model's, gets no mean: it would
stand for something that was not measured.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.analysis.significance import permutation_p, smallest_p, smallest_permutation_p
from lib.analysis.table import Difference, Stat
from lib.compare.facts import Facts, flatten, read_facts
from lib.compare.keys import differences, observed_differences
from lib.errors import EXIT_DONE, EXIT_NOT_COMPARABLE, ConfigError, Problem
from lib.rundir import RunDir
from lib.status import State, read_status

# Fewer have no spread that deserves the name.
MIN_SEEDS = 3
_NOT_FINITE = re.compile(r"\b(nan|inf|infinite|non-?finite|not finite|diverged)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Finalist:
    """One seed of a variant: its loss in nats per token, or what became of it."""

    directory: str
    seed: int
    loss: float | None
    state: str
    # Of a finished run alone.
    facts: Facts | None
    unigram_entropy: float | None = None


@dataclass(frozen=True)
class Group:
    """All seeds of one variant."""

    name: str
    seeds: Sequence[Finalist]
    problems: Sequence[str]
    # None where there are problems.
    loss: Stat | None


@dataclass(frozen=True)
class Contrast:
    """A variant against the first: what was changed, and whether chance could do it."""

    name: str
    against: str
    changes: Sequence[str]
    # Over the seeds that both have; None where that is less than two.
    paired: Difference | None
    paired_smallest_p: float | None
    difference: float
    unpaired_p: float | None
    unpaired_smallest_p: float


@dataclass(frozen=True)
class Report:
    """The variants, and each sound one against the first sound one."""

    min_seeds: int
    groups: Sequence[Group]
    contrasts: Sequence[Contrast]
    problems: Sequence[str]

    @property
    def exit_code(self) -> int:
        """0 where every variant can be claimed something of, else 4."""
        refused = self.problems or any(group.problems for group in self.groups)
        return EXIT_NOT_COMPARABLE if refused else EXIT_DONE


def judge_finalists(runs: Sequence[RunDir], names: Mapping[str, str]) -> Report:
    """Group runs that differ in their seed alone, and test each group against the first.

    ``names`` calls settings by their symbols. ConfigError where a directory holds no run.
    """
    if not runs:
        raise ConfigError(Problem("names no run", "RUNS", 'type: make finalists RUNS="DIR DIR"'))
    grouped: dict[str, list[Finalist]] = {}
    least = MIN_SEEDS
    for run in runs:
        resolved = _resolved(run)
        settings = flatten(resolved["identity"])
        seed = settings.pop("seed")
        least = max(least, int(resolved["symbols"].get("FINALIST_MIN_SEEDS", 0)))
        key = json.dumps(settings, sort_keys=True)
        grouped.setdefault(key, []).append(_finalist(run, seed))
    groups = [_group(seeds, least) for seeds in grouped.values()]
    sound = [group for group in groups if not group.problems]
    contrasts, problems = [], []
    for group in sound[1:]:
        if others := _apart(sound[0].seeds[0], group.seeds[0]):
            problems.append(f"{group.name} cannot be compared with {sound[0].name}: {others}")
        else:
            contrasts.append(_contrast(sound[0], group, names))
    return Report(least, groups, contrasts, problems)


def _resolved(run: RunDir) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(run.resolved_config.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(f"holds no run: {error}", str(run.path), "RUNS=")) from None
    return found


def _finalist(run: RunDir, seed: int) -> Finalist:
    status = read_status(run)
    if status is None or status.state is not State.SUCCESS:
        state = "not started" if status is None else status.state.lower()
        message = "" if status is None else status.message.split("\n")[0]
        word = "diverged" if _NOT_FINITE.search(message) else state
        told = f"{word}: {message}" if message else word
        return Finalist(str(run.path), seed, None, told, None)
    facts = read_facts(run)
    final = json.loads(run.summary.read_text())["final"]
    entropy = float(final["unigram_entropy"])
    return Finalist(str(run.path), seed, float(final["val_loss"]), "done", facts, entropy)


def _group(seeds: Sequence[Finalist], least: int) -> Group:
    losses = [s.loss for s in seeds if s.loss is not None]
    problems = [
        f"seed {s.seed} {s.state}; a mean over the others would hide it"
        for s in seeds
        if s.loss is None
    ]
    counts = Counter(s.seed for s in seeds)
    if twice := [str(seed) for seed, count in counts.items() if count > 1]:
        problems.append(f"seed {', '.join(twice)} stands there more than once")
    if len(counts) < least:
        problems.append(f"n={len(counts)}: at least {least} seeds are needed")
    if len(losses) > 1 and len(set(losses)) == 1:
        problems.append("all losses are the same to the last digit: the seed has no effect")
    for s in seeds:
        if s.loss is not None and s.unigram_entropy is not None and s.loss >= s.unigram_entropy:
            problems.append(
                f"seed {s.seed} is untrained: its loss of {s.loss:.4f} is no better than knowing "
                f"how often each token occurs, {s.unigram_entropy:.4f}"
            )
    for s in seeds[1:]:
        if others := _apart(seeds[0], s):
            problems.append(f"seed {s.seed} cannot be compared with seed {seeds[0].seed}: {others}")
    name = seeds[0].directory.rstrip("/").rsplit("/", 1)[-1].rsplit("-s", 1)[0]
    return Group(name, seeds, problems, None if problems else Stat.of(losses))


def _apart(a: Finalist, b: Finalist) -> str:
    if a.facts is None or b.facts is None:
        return ""
    return "; ".join(map(str, observed_differences(a.facts, b.facts)))


def _contrast(first: Group, other: Group, names: Mapping[str, str]) -> Contrast:
    a = {s.seed: s.loss for s in first.seeds if s.loss is not None}
    b = {s.seed: s.loss for s in other.seeds if s.loss is not None}
    common = [seed for seed in a if seed in b]
    facts = first.seeds[0].facts, other.seeds[0].facts
    assert facts[0] is not None and facts[1] is not None and first.loss and other.loss
    changed = [d for d in differences(facts[0], facts[1], names) if d.field not in ("SEED", "seed")]
    return Contrast(
        name=other.name,
        against=first.name,
        changes=[str(difference) for difference in changed],
        paired=Difference.of([b[seed] - a[seed] for seed in common]) if len(common) > 1 else None,
        paired_smallest_p=smallest_p(len(common)) if len(common) > 1 else None,
        difference=other.loss.mean - first.loss.mean,
        unpaired_p=permutation_p(list(a.values()), list(b.values())),
        unpaired_smallest_p=smallest_permutation_p(len(a), len(b)),
    )
