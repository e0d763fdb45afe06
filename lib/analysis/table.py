"""The result table: one row per variant over its seeds, with paired differences.

Runs with the same seed see the same data in the same order, so differences are taken between runs
of the same seed, and their spread is the spread of these paired differences. One seed gives neither
a spread nor a p-value.
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
        """Return the statistics of ``values``; None if there are none."""
        if not values:
            return None
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, len(values))


@dataclass(frozen=True)
class Difference(Stat):
    """Paired differences; ``p`` is the exact sign-flip p-value, None for one value."""

    p: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Difference | None":
        """Return the statistics of ``values``; None if there are none."""
        stat = Stat.of(values)
        return stat and cls(stat.mean, stat.sd, stat.n, sign_flip_p(values))


@dataclass(frozen=True)
class Row:
    """One variant over its seeds; figures are None if no run has a result."""

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
    # Sparsity of the prunable weights of each layer; empty without pruning.
    sparsity_by_layer: Mapping[str, float]
    # Known figures of speed, memory and utilisation; means over the seeds.
    machine: Mapping[str, float]
    # "done", the states of unfinished runs, "other code" if a run was made by different code.
    state: str
    # Field → value in a labelled table; rows with different labels are not compared.
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A small table below the main one, as text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """The rows of a study with shared notes."""

    study: str
    rows: Sequence[Row]
    # Nats per token: the loss of a model that predicts token frequencies only.
    unigram_entropy: float | None
    # Remarks on single runs, such as failures and runs made by different code.
    notes: Sequence[str]
    # Combinations that the configuration rules out, each with its reason.
    left_out: Sequence[str] = ()
    sections: Sequence[Section] = ()


def build_table(
    study: str,
    runs: Sequence[Run[Any]],
    kept: Collection[str] = (),
    left_out: Sequence[str] = (),
    label_by: Sequence[str] = (),
) -> Table:
    """Read the directories of ``runs`` and return the table of their results.

    ``kept`` lists the labels of runs made by different code, ``left_out`` the unplanned
    combinations with reasons. A run that differs from the baseline in more than its variant's
    settings is reported as not comparable, unless ``label_by`` lists the differing fields: then it
    gets a separate row labelled with their values. Each arm of a plan gets separate rows too.
    Raises ConfigError if ``label_by`` contains an unknown field.
    """
    items = [read_result(run) for run in runs]
    rows, compared = [], []
    for arm, arm_items in _by_arm(items).items():
        variants = list({item.run.variant.slug: item.run.variant for item in arm_items}.values())
        baseline = next((v.slug for v in variants if not v.parent), "")
        for part in parts(arm_items, baseline, label_by):
            labelled = replace(part, labels={"arm": arm, **part.labels}) if arm else part
            rows += _rows(labelled, variants, baseline, kept)
            compared += part.items
    results = [item for item in compared if isinstance(item, Result)]
    holes = [item for item in compared if isinstance(item, Hole)]
    notes = [f"{h.run.label}: {h.state}: {h.reason}" for h in holes if h.reason]
    notes += [f"{r.run.label}: made by different code" for r in results if r.run.label in kept]
    notes += [f"{r.run.label}: {note}" for r in results for note in _remarks(r)]
    reused = [
        r.run for r in results if r.run.path != own_path(r.run, r.run.path.parents[1] / study)
    ]
    notes += [f"{run.label}: reuses run {run.path.parent.name}/{run.path.name}" for run in reused]
    unigram_entropy = results[0].unigram_entropy if results else None
    return Table(study, rows, unigram_entropy, notes, left_out)


def _by_arm(items: Sequence[Result | Hole]) -> dict[str, list[Result | Hole]]:
    """Return the runs by arm of the plan, in order; a plan without arms has one."""
    arms: dict[str, list[Result | Hole]] = {}
    for item in items:
        arms.setdefault(item.run.variant.arm, []).append(item)
    return arms


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


def _remarks(result: Result) -> list[str]:
    """Return remarks on the run that hold even if every run of the table shares them."""
    edited, fallbacks = (
        result.facts.observed[name] for name in ("changed_during_run", "oom_fallbacks")
    )
    notes = [f"code was edited during the run: {', '.join(edited)}"] if edited else []
    return notes + ([f"out of memory, fallbacks applied: {fallbacks}"] if fallbacks else [])


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


def _layers(by_seed: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over the seeds; all seeds have the same layers."""
    return {
        name: statistics.fmean(each[name] for each in by_seed) for name in (by_seed or ({},))[0]
    }


def _difference(results: Sequence[Result], others: Sequence[Result]) -> Difference | None:
    """Return the difference from ``others`` over the seeds that both have."""
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
    """Return exp(loss); None if there is no loss or the result overflows."""
    try:
        return None if loss is None else math.exp(loss.mean)
    except OverflowError:
        return None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
