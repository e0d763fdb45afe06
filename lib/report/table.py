"""The result table: one row per variant over its seeds, with paired differences.

A result is comparable with the baseline if the two runs differ only in planned settings. Any other
result is reported as a hole, or put into a separate part if the user names the differing fields as
labels. Runs with the same seed see the same data in the same order, so differences are taken
between runs of the same seed, and their spread is the spread of these paired differences. One seed
gives neither a spread nor a verdict. Verdicts on the differences: lib/report/study_verdicts.py.

Marginal effects compare each level of a sweep's factor with the reference level over pairs of cells
that agree in every other factor. A missing or failed combination removes its pair and does not bias
the difference. All subsets of n features give 2^(n−1) pairs; a leave-one-out design gives one. A
level without any such pair has no difference.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem
from lib.plan.run import PlannedRun, RunVariant, run_name
from lib.report.contrasts import AA_ROLE, contrasts_of, control_contrasts, design_effects
from lib.report.declarations import configuration_digest, studies_on
from lib.report.options import NATS
from lib.report.render import TableSection
from lib.report.replay import StudyPart, VerdictPlan, declare
from lib.report.run_facts import code_digest, observed_differences
from lib.report.run_results import (
    MissingResult,
    RunResult,
    mean_over_seeds,
    read_run_results,
    sparsity_by_layer,
)
from lib.report.study_verdicts import StudyVerdicts, judge_study
from lib.report.verdicts import ContrastVerdict, SeedOutcome
from lib.runs.record import UNKNOWN
from lib.tracking.stability import instability_text
from lib.units import format_runs

# Note on a table without verdicts.
NOT_JUDGED = "no verdicts: the file of the study has judge = false"


@dataclass(frozen=True)
class ComparableGroup:
    """Results that can be compared with each other, and the holes listed beside them."""

    # Field → value shared by all results of the part; empty without labels.
    labels: Mapping[str, str]
    items: Sequence[RunResult | MissingResult]


def split_comparable(
    items: Sequence[RunResult | MissingResult],
    baselines: Mapping[str, str],
    label_by: Sequence[str] = (),
    unit: str = NATS,
) -> list[ComparableGroup]:
    """Return one part, or one part per combination of label values.

    A result that differs in an observed fact or in code from its part's first result of its variant in
    ``baselines`` becomes a hole with the reason. Runs without a result are listed in the first part.
    Raises ConfigError if ``label_by`` contains an unknown field.
    """
    results = [item for item in items if isinstance(item, RunResult)]
    grouped: dict[tuple[str, ...], list[RunResult]] = {}
    for item, label in zip(results, _labels(results, label_by), strict=True):
        grouped.setdefault(label, []).append(item)
    holes = [item for item in items if isinstance(item, MissingResult)]
    if not grouped:
        return [ComparableGroup({}, holes)]
    return [
        ComparableGroup(
            dict(zip(label_by, label, strict=True)),
            [*_checked(items, baselines, unit), *(holes if number == 0 else [])],
        )
        for number, (label, items) in enumerate(grouped.items())
    ]


def _checked(
    results: Sequence[RunResult], baselines: Mapping[str, str], unit: str
) -> list[RunResult | MissingResult]:
    references: dict[str, RunResult] = {r.run.variant.text: r for r in reversed(results)}
    for result in reversed(results):
        if result.run.variant.slug == baselines.get(result.run.variant.text):
            references[result.run.variant.text] = result
    return [_against(references[result.run.variant.text], result, unit) for result in results]


def _against(reference: RunResult, result: RunResult, unit: str) -> RunResult | MissingResult:
    mismatches = observed_differences(reference.facts, result.facts, unit)
    if not mismatches:
        return result
    fields = tuple(difference.field for difference in mismatches)
    reason = f"against {reference.run.label}: " + "; ".join(map(str, mismatches))
    return MissingResult(result.run, f"not comparable: {', '.join(fields)}", reason, fields)


def _labels(results: Sequence[RunResult], label_by: Sequence[str]) -> list[tuple[str, ...]]:
    if not results or not label_by:
        return [()] * len(results)
    shared = set.intersection(*(set(r.facts.sources) for r in results))
    labels: list[tuple[str, ...]] = []
    for result in results:
        try:
            labels.append(
                tuple(
                    (
                        code_digest(result.facts.sources, sorted(shared))
                        if field == "code"
                        else str(result.facts.value(field))
                    )
                    for field in label_by
                )
            )
        except KeyError as error:
            known = f"a symbol or field of {result.run.label}"
            what = f"unknown field {error.args[0]!r} (expected {known})"
            raise ConfigError(Problem(what, "LABEL_BY", code="usage.unknown-field")) from None
    return labels


@dataclass(frozen=True)
class SampleStats:
    """Mean and sample standard deviation of ``n`` values; ``sd`` is None for one value."""

    mean: float
    sd: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "SampleStats | None":
        """Return the statistics of ``values``; None if there are none."""
        if not values:
            return None
        sd = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), sd, len(values))


@dataclass(frozen=True)
class TableRow:
    """One variant over its seeds; figures are None if no run has a result."""

    variant: RunVariant
    val_loss: SampleStats | None
    # exp(mean loss): the geometric mean of the seeds' perplexities; None in bits per byte.
    perplexity: float | None
    # Paired by seed; None if a seed of either side diverged.
    delta_baseline: SampleStats | None
    delta_parent: SampleStats | None
    parameters: int | None
    # Means over the seeds.
    tokens: float | None
    train_seconds: float | None
    sparsity: float | None
    # Sparsity of the prunable weights of each layer; empty without pruning.
    sparsity_by_layer: Mapping[str, float]
    # Known figures of speed, memory and utilisation; means over the seeds.
    machine: Mapping[str, float]
    # "done", the states of unfinished runs, "stale" if a run was made by other code.
    state: str
    # Directories, run ids and configuration hashes of the finished runs, by seed; their commits.
    origins: Mapping[str, Sequence[str]]
    # Field → value in a labelled table; rows with different labels are not compared.
    labels: Mapping[str, str] = field(default_factory=dict)
    verdict_baseline: ContrastVerdict | None = None
    verdict_parent: ContrastVerdict | None = None

    @property
    def name(self) -> str:
        """Return the name of the row in verdicts: its labels and its variant."""
        return f"{_prefix(self.labels)}{self.variant.slug}"


@dataclass(frozen=True)
class ResultTable:
    """The rows of a study with shared notes."""

    study: str
    rows: Sequence[TableRow]
    # Nats per token: the loss of a model that predicts token frequencies only; None in another unit.
    unigram_entropy: float | None
    # Remarks on single runs, such as failures and runs made by different code.
    notes: Sequence[str]
    # Combinations that the configuration rules out, each with its reason.
    left_out: Sequence[str] = ()
    sections: Sequence[TableSection] = ()
    verdicts: StudyVerdicts = field(default_factory=lambda: judge_study([], VerdictPlan()))
    # The runs behind the rows; each part has its own baseline.
    parts: Sequence[ComparableGroup] = ()
    # All finished runs, in the order of the plan: also those that are not comparable.
    finished: Sequence[RunResult] = ()

    @property
    def results(self) -> list[RunResult]:
        """Return the finished and comparable runs."""
        return [r for part in self.parts for r in part.items if isinstance(r, RunResult)]


def build_table(
    study: str,
    runs: Sequence[PlannedRun[Any]],
    is_stale: Callable[[RunResult], bool] = lambda result: False,
    left_out: Sequence[str] = (),
    label_by: Sequence[str] = (),
    verdict_plan: VerdictPlan | None = None,
    shown: Collection[Path] | None = None,
) -> ResultTable:
    """Read the directories of ``runs`` and return the table of their results.

    ``is_stale`` tells the runs made by different code, ``left_out`` lists the unplanned
    combinations with reasons. A run that differs from the baseline in more than its variant's
    settings is reported as not comparable, unless ``label_by`` lists the differing fields: then it
    gets a separate row labelled with their values.
    All comparisons of the table form one family under the rule of ``verdict_plan``. Verdicts rest on
    all ``runs``; if ``shown`` lists directories, the table has their rows only. Raises ConfigError if
    ``label_by`` contains an unknown field, or no run has a result to label.
    """
    plan = verdict_plan or VerdictPlan()
    items = read_run_results(runs, plan.unit)
    finished = [item for item in items if isinstance(item, RunResult)]
    if label_by and not finished:
        what = f"no run has a result to label by {', '.join(label_by)}"
        raise ConfigError(Problem(what, "LABEL_BY", "type: make", code="run.not-found"))
    kept = {result.run.label for result in finished if is_stale(result)}
    rows: list[TableRow] = []
    variants = list({item.run.variant.slug: item.run.variant for item in items}.values())
    baselines = {v.text: v.slug for v in reversed(variants) if not v.parent}
    parts = split_comparable(items, baselines, label_by, plan.unit)
    verdicts = _judged_parts(parts, variants, plan)
    if shown is not None:
        parts = [replace(p, items=[i for i in p.items if i.run.path in shown]) for p in parts]
        variants = [v for v in variants if any(i.run.variant is v for p in parts for i in p.items)]
        verdicts = verdicts.of_arms(
            {f"{_prefix(p.labels)}{v.slug}" for p in parts for v in variants}
        )
    for part in parts:
        rows += variant_rows(part, variants, baselines, kept)
    items = [item for part in parts for item in part.items]
    results = [item for item in items if isinstance(item, RunResult)]
    rows = [_with_verdicts(row, verdicts) for row in rows]
    if plan.unit != NATS:
        rows = [replace(row, perplexity=None) for row in rows]
    notes = list(verdicts.notes) if plan.judged else [NOT_JUDGED]
    notes += hole_notes([item for item in items if isinstance(item, MissingResult)])
    if stale := [result.run.label for result in results if result.run.label in kept]:
        notes.append(f"{format_runs(stale)}: stale, made by other code")
    if unstable := [result for result in results if result.unstable]:
        labels = format_runs([result.run.label for result in unstable])
        notes.append(f"{labels}: {instability_text(unstable[0].unstable)}")
    notes += [f"{r.run.label}: {note}" for r in results for note in _remarks(r)]
    reused = [r.run for r in results if r.run.path.parts[-2:] != (study, run_name(r.run))]
    notes += [f"{run.label}: reuses run {run.path.parent.name}/{run.path.name}" for run in reused]
    known = results and plan.unit == NATS
    unigram_entropy = results[0].final.unigram_entropy if known else None
    return ResultTable(study, rows, unigram_entropy, notes, left_out, (), verdicts, parts, finished)


def judge_runs(runs: Sequence[PlannedRun[Any]], plan: VerdictPlan) -> StudyVerdicts:
    """Read the directories of ``runs``, and return the verdicts at the looks declared so far."""
    variants = list({run.variant.slug: run.variant for run in runs}.values())
    baselines = {v.text: v.slug for v in reversed(variants) if not v.parent}
    parts = split_comparable(read_run_results(runs, plan.unit), baselines, unit=plan.unit)
    return _judged_parts(parts, variants, replace(plan, exploratory=True))


def _judged_parts(
    parts: Sequence[ComparableGroup], variants: Sequence[RunVariant], plan: VerdictPlan
) -> StudyVerdicts:
    """Declare the look that is due, if the plan takes looks, and return the verdicts."""
    compared = variants if plan.judged else []
    contrasts = contrasts_of(compared, plan.against, plan.interactions)
    effects = design_effects(compared, plan.interactions)
    judged: list[StudyPart] = []
    controls: list[StudyPart] = []
    for part in parts:
        prefix, outcomes = _prefix(part.labels), _outcomes(part)
        judged.append((prefix, contrasts, outcomes))
        controls.append((prefix, control_contrasts(compared), outcomes))
    items = [item for part in parts for item in part.items]
    results = [item for item in items if isinstance(item, RunResult)]
    evaluation_set = _evaluation_set(results, plan.unit)
    if plan.looks is not None:
        configs = {item.run.variant.slug: item.run.config for item in reversed(items)}
        digests = {slug: configuration_digest(c.identity()) for slug, c in configs.items()}
        plan = replace(plan, configurations={**digests, **plan.configurations})
    plan = declare(plan, judged, evaluation_set)
    verdicts = judge_study(judged, plan, controls, effects)
    others: list[str] = []
    if plan.folder is not None:
        others = studies_on(evaluation_set, plan.folder, plan.configurations)
    return replace(verdicts, evaluation_set=evaluation_set, on_same_documents=others)


def hole_notes(holes: Sequence[MissingResult]) -> list[str]:
    """Return a note for each reason why runs have no result, with these runs."""
    runs: dict[str, list[str]] = {}
    for hole in holes:
        if hole.reason:
            runs.setdefault(f"{hole.state}: {hole.reason}", []).append(hole.run.label)
    return [f"{format_runs(labels)}: {reason}" for reason, labels in runs.items()]


def _evaluation_set(results: Sequence[RunResult], unit: str) -> str:
    """Return the digest of the evaluation documents of the runs; "" if they differ."""
    facts = [result.facts for result in results]
    digests = {str(f.observed["documents"]) if unit == NATS else f.text for f in facts}
    return digests.pop() if len(digests) == 1 else ""


def _prefix(labels: Mapping[str, str]) -> str:
    """Return the beginning of the names of a labelled part in verdicts."""
    return "".join(f"{value}:" for value in labels.values())


def _outcomes(part: ComparableGroup) -> dict[str, list[SeedOutcome]]:
    outcomes: dict[str, list[SeedOutcome]] = {}
    for item in part.items:
        run, outcome = item.run, item.outcome
        if run.path.parent.name != run.study:
            outcome = replace(outcome, reused=True)
        outcomes.setdefault(run.variant.slug, []).append(outcome)
    return outcomes


def _with_verdicts(row: TableRow, study: StudyVerdicts) -> TableRow:
    prefix, variant = _prefix(row.labels), row.variant
    step = f"{prefix}{variant.slug}"
    verdicts = [v for v in (*study.verdicts, *study.aa_steps) if v.contrast.step == step]
    by_reference = {v.contrast.reference: v for v in verdicts}
    baseline = next((v for v in verdicts if v.contrast.role in ("baseline", AA_ROLE)), None)
    return replace(
        row,
        verdict_baseline=baseline,
        verdict_parent=by_reference.get(f"{prefix}{variant.parent}"),
    )


def variant_rows(
    part: ComparableGroup,
    variants: Sequence[RunVariant],
    baselines: Mapping[str, str],
    kept: Collection[str],
) -> list[TableRow]:
    """Return a row for each variant that has a planned run in ``part``.

    ``baselines`` are names of variants by the text that an evaluation predicts.
    """
    results: dict[str, list[RunResult]] = {}
    holes: dict[str, list[MissingResult]] = {}
    for item in part.items:
        slug = item.run.variant.slug
        if isinstance(item, RunResult):
            results.setdefault(slug, []).append(item)
        else:
            holes.setdefault(slug, []).append(item)
    # The finished seeds of a variant with a diverged seed are a biased sample.
    diverged = {item.run.variant.slug for item in part.items if item.outcome.diverged}
    compared = {slug: runs for slug, runs in results.items() if slug not in diverged}
    rows = []
    for variant in variants:
        baseline = baselines.get(variant.text, "")
        if variant.slug in {*results, *holes}:
            rows.append(
                _row(
                    variant,
                    sorted(results.get(variant.slug, []), key=lambda result: result.run.seed),
                    holes.get(variant.slug, []),
                    compared.get(baseline, []) if baseline != variant.slug else [],
                    compared.get(variant.parent, []),
                    kept,
                    part.labels,
                )
            )
    return rows


def _remarks(result: RunResult) -> list[str]:
    """Return remarks on the run that hold even if every run of the table shares them."""
    edited, fallbacks = (
        result.facts.observed[name] for name in ("changed_during_run", "oom_fallbacks")
    )
    notes = [f"code was edited during the run: {', '.join(edited)}"] if edited else []
    notes += [f"out of memory, fallbacks applied: {fallbacks}"] if fallbacks else []
    return notes + [f"{result.damage}; figures of the machine are missing"] * bool(result.damage)


def _row(
    variant: RunVariant,
    results: Sequence[RunResult],
    holes: Sequence[MissingResult],
    baseline: Sequence[RunResult],
    parent: Sequence[RunResult],
    kept: Collection[str],
    labels: Mapping[str, str],
) -> TableRow:
    diverged = any(r.outcome.diverged for r in results) or any(h.outcome.diverged for h in holes)
    loss = None if diverged else SampleStats.of([r.loss for r in results])
    return TableRow(
        variant=variant,
        val_loss=loss,
        perplexity=_perplexity(loss),
        delta_baseline=None if diverged else _difference(results, baseline),
        delta_parent=None if diverged else _difference(results, parent),
        parameters=results[0].final.parameters if results else None,
        tokens=_mean([r.final.tokens for r in results]),
        train_seconds=_mean([r.timing.train_seconds for r in results]),
        sparsity=_mean([r.final.sparsity for r in results]),
        sparsity_by_layer=mean_over_seeds([sparsity_by_layer(r.final) for r in results]),
        machine=mean_over_seeds([r.machine for r in results]),
        state=_state(results, holes, kept),
        origins=_origins(results),
        labels=labels,
    )


def _origins(results: Sequence[RunResult]) -> dict[str, Sequence[str]]:
    origins = [result.origin for result in results]
    return {
        "runs": [result.run.path.name for result in results],
        "run_ids": [origin.run_id for origin in origins],
        "configurations": [origin.configuration for origin in origins],
        "commits": list(dict.fromkeys(origin.commit or UNKNOWN for origin in origins)),
    }


def _difference(results: Sequence[RunResult], others: Sequence[RunResult]) -> SampleStats | None:
    """Return the difference from ``others`` over the seeds that both have."""
    by_seed = {other.run.seed: other.loss for other in others}
    return SampleStats.of([r.loss - by_seed[r.run.seed] for r in results if r.run.seed in by_seed])


def _state(
    results: Sequence[RunResult], holes: Sequence[MissingResult], kept: Collection[str]
) -> str:
    done, total = len(results), len(results) + len(holes)
    word = "stale" if any(result.run.label in kept for result in results) else "done"
    parts = [word if done == total else f"{done} of {total} {word}"] if done else []
    if unstable := sum(bool(result.unstable) for result in results):
        # Only finished runs are counted, and a narrow terminal has no columns for two words.
        parts = [part for part in parts if part != "done"]
        parts.append("UNSTABLE" if unstable == done else f"UNSTABLE {unstable}/{done}")
    return ", ".join([*parts, *sorted({hole.state for hole in holes})])


def _perplexity(loss: SampleStats | None) -> float | None:
    """Return exp(loss); None if there is no loss or the result overflows."""
    try:
        return None if loss is None else math.exp(loss.mean)
    except OverflowError:
        return None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class MarginalEffect:
    """One level of one factor. Losses are in nats per token."""

    factor: str
    level: str
    # Mean over all cells of the level.
    val_loss: float
    cells: int
    # The reference level; equal to ``level`` for the reference itself.
    reference: str
    # Loss minus reference loss over the pairs; None without pairs and for the reference.
    difference: SampleStats | None


def marginal_effects(rows: Sequence[TableRow]) -> list[MarginalEffect]:
    """Return every level of every factor with more than one level, in the order of the rows."""
    cells = [
        (row.variant.levels, row.variant.text, row.val_loss.mean)
        for row in rows
        if row.variant.levels is not None and row.val_loss is not None
    ]
    factors: dict[str, dict[str, None]] = {}
    for levels, _, _ in cells:
        for factor, level in levels.items():
            factors.setdefault(factor, {})[level] = None
    effects: list[MarginalEffect] = []
    for factor, levels_of in factors.items():
        if len(levels_of) > 1:
            effects += _factor_marginals(factor, list(levels_of), cells)
    return effects


def _factor_marginals(
    factor: str, names: Sequence[str], cells: Sequence[tuple[Mapping[str, str], str, float]]
) -> list[MarginalEffect]:
    # Predicted text and settings of the other factors → level of this factor → loss.
    by_rest: dict[tuple, dict[str, float]] = {}
    for levels, text, loss in cells:
        if factor in levels:
            rest = text, *(item for item in levels.items() if item[0] != factor)
            by_rest.setdefault(rest, {})[levels[factor]] = loss
    groups = list(by_rest.values())
    # The level paired with the most other levels; the first one on a tie.
    reference = max(names, key=lambda name: len({n for g in groups if name in g for n in g}))
    marginal = []
    for name in names:
        losses = [group[name] for group in groups if name in group]
        pairs = [g[name] - g[reference] for g in groups if {name, reference} <= g.keys()]
        difference = SampleStats.of(pairs) if name != reference else None
        mean = statistics.fmean(losses)
        marginal.append(MarginalEffect(factor, name, mean, len(losses), reference, difference))
    return marginal
