"""The result table: one row for each variant, seeds taken together, differences pair by pair.

Runs of one seed see the same data in the same order, so a difference is taken between runs of the
same seed, and its spread is that of these differences. One seed gives no spread and no verdict.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lib.analysis.comparable import Part, parts
from lib.analysis.machine import over_seeds
from lib.analysis.results import Hole, Result, read_result
from lib.analysis.significance import sign_flip_p
from lib.plan import Run, Variant, own_path


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation of ``n`` values; ``sd`` is None for one value."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Stat | None":
        """None without values."""
        if not values:
            return None
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, len(values))


@dataclass(frozen=True)
class Difference(Stat):
    """Paired differences; ``p`` is their exact sign-flip test's, None for one value."""

    p: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Difference | None":
        """None without values."""
        stat = Stat.of(values)
        return stat and cls(stat.mean, stat.sd, stat.n, sign_flip_p(values))


@dataclass(frozen=True)
class Row:
    """One variant over its seeds; figures are None where no run has a result."""

    variant: Variant
    val_loss: Stat | None
    # exp(mean loss): the geometric mean of the seeds' perplexities.
    perplexity: float | None
    delta_baseline: Difference | None
    delta_parent: Difference | None
    parameters: int | None
    # Means over the seeds.
    tokens: float | None
    train_seconds: float | None
    sparsity: float | None
    # Of the prunable weights of each layer; empty without pruning.
    sparsity_by_layer: Mapping[str, float]
    # Of speed, memory and utilisation those that are known; means over the seeds.
    machine: Mapping[str, float]
    # What the runs came to: "done", what is missing, "other code" where that made one.
    state: str
    # Field → value, in a table that is labelled; rows of other labels are not compared with this.
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A small table below the main one: what its runs show besides, as text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A study's rows, and what holds for all of them."""

    study: str
    rows: Sequence[Row]
    # Nats per token: the loss of a model that knows only how often each token occurs.
    unigram_entropy: float | None
    # What a reader must know of single runs: failures, runs by other code.
    notes: Sequence[str]
    # Combinations that the configuration does not allow, each with its reason.
    left_out: Sequence[str] = ()
    sections: Sequence[Section] = ()


def build_table(
    study: str,
    runs: Sequence[Run[Any]],
    kept: Collection[str] = (),
    left_out: Sequence[str] = (),
    label_by: Sequence[str] = (),
) -> Table:
    """Read the directories of ``runs`` and put them side by side.

    ``kept`` are the labels of runs that other code made, ``left_out`` what was not planned and why.
    A run that differs from the baseline in more than its variant says is not compared and says so,
    unless ``label_by`` names the fields: then its row stands apart, under their values. So do the
    rows of each arm of a plan. ConfigError where ``label_by`` names no field.
    """
    read = [read_result(run) for run in runs]
    rows, items = [], []
    for arm, of_arm in _by_arm(read).items():
        variants = list({item.run.variant.slug: item.run.variant for item in of_arm}.values())
        baseline = next((v.slug for v in variants if not v.parent), "")
        for part in parts(of_arm, baseline, label_by):
            labelled = replace(part, labels={"arm": arm, **part.labels}) if arm else part
            rows += _rows(labelled, variants, baseline, kept)
            items += part.items
    results = [item for item in items if isinstance(item, Result)]
    holes = [item for item in items if isinstance(item, Hole)]
    notes = [f"{h.run.label}: {h.state}: {h.reason}" for h in holes if h.reason]
    notes += [f"{r.run.label}: made by other code" for r in results if r.run.label in kept]
    notes += [f"{r.run.label}: {note}" for r in results for note in _worth_knowing(r)]
    borrowed = [
        r.run for r in results if r.run.path != own_path(r.run, r.run.path.parents[1] / study)
    ]
    notes += [
        f"{run.label}: the same run as {run.path.parent.name}/{run.path.name}" for run in borrowed
    ]
    unigram_entropy = results[0].unigram_entropy if results else None
    return Table(study, rows, unigram_entropy, notes, left_out)


def _by_arm(read: Sequence[Result | Hole]) -> dict[str, list[Result | Hole]]:
    """The runs of each arm of the plan, in order; a plan without arms is one."""
    found: dict[str, list[Result | Hole]] = {}
    for item in read:
        found.setdefault(item.run.variant.arm, []).append(item)
    return found


def _rows(
    part: Part, variants: Sequence[Variant], baseline: str, kept: Collection[str]
) -> list[Row]:
    results = [item for item in part.items if isinstance(item, Result)]
    holes = [item for item in part.items if isinstance(item, Hole)]
    present = {item.run.variant.slug for item in part.items}
    return [
        _row(
            variant,
            [r for r in results if r.run.variant.slug == variant.slug],
            [h for h in holes if h.run.variant.slug == variant.slug],
            [r for r in results if r.run.variant.slug == baseline != variant.slug],
            [r for r in results if r.run.variant.slug == variant.parent],
            kept,
            part.labels,
        )
        for variant in variants
        if variant.slug in present
    ]


def _worth_knowing(result: Result) -> list[str]:
    """What all runs of a table may share, and a reader has to know."""
    edited, fallbacks = (
        result.facts.observed[name] for name in ("changed_during_run", "oom_fallbacks")
    )
    notes = [f"code was edited while it ran: {', '.join(edited)}"] if edited else []
    return notes + ([f"memory ran out: {fallbacks}"] if fallbacks else [])


def _row(
    variant: Variant,
    results: Sequence[Result],
    holes: Sequence[Hole],
    baseline: Sequence[Result],
    parent: Sequence[Result],
    kept: Collection[str],
    labels: Mapping[str, str],
) -> Row:
    loss = Stat.of([r.val_loss for r in results])
    return Row(
        variant=variant,
        val_loss=loss,
        perplexity=_perplexity(loss),
        delta_baseline=_difference(results, baseline),
        delta_parent=_difference(results, parent),
        parameters=results[0].parameters if results else None,
        tokens=_mean([r.tokens for r in results]),
        train_seconds=_mean([r.train_seconds for r in results]),
        sparsity=_mean([r.sparsity for r in results]),
        sparsity_by_layer=_layers([r.sparsity_by_layer for r in results]),
        machine=over_seeds([r.machine for r in results]),
        state=_state(results, holes, kept),
        labels=labels,
    )


def _layers(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the seeds, whose models are alike."""
    return {name: statistics.fmean(each[name] for each in found) for name in (found or ({},))[0]}


def _difference(results: Sequence[Result], others: Sequence[Result]) -> Difference | None:
    """Loss minus the other's, for each seed that both have."""
    by_seed = {other.run.seed: other.val_loss for other in others}
    return Difference.of(
        [r.val_loss - by_seed[r.run.seed] for r in results if r.run.seed in by_seed]
    )


def _state(results: Sequence[Result], holes: Sequence[Hole], kept: Collection[str]) -> str:
    done, total = len(results), len(results) + len(holes)
    parts = ["done" if done == total else f"{done} of {total} done"] if done else []
    parts += sorted({hole.state for hole in holes})
    parts += ["other code"] if any(result.run.label in kept for result in results) else []
    return ", ".join(parts)


def _perplexity(loss: Stat | None) -> float | None:
    """exp(loss); None, too, where it is beyond floating point."""
    try:
        return None if loss is None else math.exp(loss.mean)
    except OverflowError:
        return None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
