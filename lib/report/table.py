"""The results of a study: one row per variant over its seeds, with paired differences.

A result is comparable with the baseline if the two runs differ only in planned settings. Any other
result is listed with the reason, or put into a separate part if the user names the differing fields
as labels. Runs with the same seed see the same data in the same order, so differences are taken
between runs of the same seed, and their spread is the spread of these paired differences. One seed
gives neither a spread nor a verdict. Verdicts on the differences: lib/report/study_verdicts.py.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem
from lib.report.contrasts import AA_ROLE, contrasts_of, control_contrasts, design_effects
from lib.report.declarations import VerdictPlan, configuration_digest, studies_on
from lib.report.options import NATS
from lib.report.render import TableSection
from lib.report.run_facts import code_digest, observed_differences, recorded_facts
from lib.report.run_results import (
    absent_outcome,
    mean_over_seeds,
    planned_run,
    read_records,
    run_origin,
    run_outcome,
    run_utilisation,
)
from lib.report.study_verdicts import StudyPart, StudyVerdicts, declare
from lib.report.verdicts import SeedOutcome
from lib.runs.record import UNKNOWN, RunRecord
from lib.runs.run import Run, RunVariant
from lib.tracking.stability import instability_text, unstable_steps
from lib.units import format_runs

# Note on a table without verdicts.
NOT_JUDGED = "no verdicts: the file of the study has judge = false"

# Field → value shared by the results of a part of the study; empty without labels. Parts are not
# compared with each other, and each has its own baselines.
Labels = Mapping[str, str]
# A planned run, and its loss or why it has none.
StudyRun = tuple[RunRecord, SeedOutcome]
Parts = Sequence[tuple[Labels, Sequence[StudyRun]]]


@dataclass(frozen=True)
class RowRuns:
    """The runs of one variant in one part of a study, by seed."""

    variant: RunVariant
    labels: Labels
    runs: Sequence[StudyRun]
    # None for the baseline itself.
    baseline: "RowRuns | None" = None
    parent: "RowRuns | None" = None

    @property
    def name(self) -> str:
        """Return the name of the row in verdicts: its labels and its variant."""
        return f"{_prefix(self.labels)}{self.variant.slug}"

    @property
    def records(self) -> list[RunRecord]:
        """Return the runs with a comparable result."""
        return [record for record, outcome in self.runs if outcome.loss is not None]

    @property
    def losses(self) -> dict[int, float]:
        """Return the seed and the loss of each run with a result, in the unit of the study."""
        return {each.seed: each.loss for _, each in self.runs if each.loss is not None}

    @property
    def diverged(self) -> bool:
        """Return whether a seed diverged: the finished ones are a biased sample."""
        return any(outcome.diverged for _, outcome in self.runs)

    @property
    def pairs(self) -> list[tuple[RunRecord, RunRecord]]:
        """Return the runs of the row, each with the baseline's run of the same seed."""
        others = self.baseline.records if self.baseline else ()
        by_seed = {planned_run(record).seed: record for record in others}
        seeds = [(planned_run(record).seed, record) for record in self.records]
        return [(record, by_seed[seed]) for seed, record in seeds if seed in by_seed]


@dataclass(frozen=True)
class ResultTable:
    """The runs of a study, read and judged once, or a part of them."""

    study: str
    # In the order of the plan, also those without a result.
    records: Sequence[RunRecord] = ()
    parts: Parts = ()
    # Directories of the runs that were made by other code.
    stale: Collection[Path] = ()
    # On all runs of the study, without the comparisons of variants that this part lacks.
    verdicts: StudyVerdicts = field(default_factory=lambda: StudyVerdicts([], VerdictPlan()))
    # Combinations that the configuration rules out, each with its reason.
    left_out: Sequence[str] = ()
    # Remark on the plan; "" if there is none.
    plan_note: str = ""
    # Such as runs of other configurations, which the rows do not contain.
    sections: Sequence[TableSection] = ()

    def of_runs(self, shown: Collection[Path]) -> "ResultTable":
        """Return the part of the table with the rows of the directories ``shown``."""
        parts = [
            (labels, [each for each in runs if each[0].run.path in shown])
            for labels, runs in self.parts
        ]
        arms = {
            f"{_prefix(labels)}{planned_run(record).variant.slug}"
            for labels, runs in parts
            for record, _ in runs
        }
        return replace(self, parts=parts, verdicts=self.verdicts.of_arms(arms))

    @cached_property
    def runs(self) -> list[RowRuns]:
        """Return the runs behind the rows, in the same order."""
        return row_runs(self.parts, _variants(self.records))

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Return one row per variant and part, as in the document (``lib.report.study``)."""
        return [row_document(row, self.verdicts, self.stale) for row in self.runs]

    @property
    def finished(self) -> list[RunRecord]:
        """Return all finished runs of the study: also those that are not comparable."""
        unit = self.verdicts.plan.unit
        return [record for record in self.records if run_outcome(record, unit).loss is not None]

    @property
    def results(self) -> list[RunRecord]:
        """Return the finished and comparable runs of the rows, in the order of the plan."""
        listed = {record.run.path for row in self.runs for record in row.records}
        return [record for record in self.records if record.run.path in listed]

    @property
    def unigram_entropy(self) -> float | None:
        """Return the loss of a model that predicts token frequencies only, in nats per token; None
        in another unit.
        """
        results = [r for _, runs in self.parts for r, outcome in runs if outcome.loss is not None]
        is_known = results and self.verdicts.plan.unit == NATS
        return results[0].final.unigram_entropy if is_known else None

    @property
    def notes(self) -> list[str]:
        """Return remarks on the plan, the verdicts, and single runs, such as failures."""
        judged = self.verdicts.notes if self.verdicts.plan.judged else [NOT_JUDGED]
        listed = [each for _, runs in self.parts for each in runs]
        of_runs = _notes(self.study, listed, self.stale)
        return [*filter(None, [self.plan_note]), *judged, *of_runs]


def build_table(
    study: str,
    runs: Sequence[Run[Any]],
    is_stale: Callable[[RunRecord], bool] = lambda record: False,
    left_out: Sequence[str] = (),
    label_by: Sequence[str] = (),
    verdict_plan: VerdictPlan | None = None,
) -> ResultTable:
    """Read the directories of ``runs`` and return the table of their results.

    ``is_stale`` tells the runs made by different code, ``left_out`` lists the unplanned
    combinations with reasons. A run that differs from the baseline in more than its variant's
    settings is reported as not comparable, unless ``label_by`` lists the differing fields: then it
    gets a separate row labelled with their values.
    All comparisons of the table form one family under the rule of ``verdict_plan``. Raises
    ConfigError if ``label_by`` contains an unknown field, or no run has a result to label.
    """
    plan = verdict_plan or VerdictPlan()
    records = read_records(runs, plan.unit)
    outcomes = [(record, run_outcome(record, plan.unit)) for record in records]
    finished = [record for record, outcome in outcomes if outcome.loss is not None]
    if label_by and not finished:
        what = f"no run has a result to label by {', '.join(label_by)}"
        raise ConfigError(Problem(what, "LABEL_BY", "type: make", code="run.not-found"))
    variants = _variants(records)
    parts = _comparable_parts(outcomes, _baselines(variants), label_by, plan.unit)
    verdicts = _judged_parts(parts, variants, plan)
    stale = {record.run.path for record in finished if is_stale(record)}
    return ResultTable(study, records, parts, stale, verdicts, left_out)


def _variants(records: Sequence[RunRecord]) -> list[RunVariant]:
    """Return the planned variants in their order."""
    runs = map(planned_run, records)
    return list({run.variant.slug: run.variant for run in runs}.values())


def _baselines(variants: Sequence[RunVariant]) -> dict[str, str]:
    """Return the text that an evaluation predicts → slug of its first variant without a parent."""
    return {v.text: v.slug for v in reversed(variants) if not v.parent}


# Which runs can be compared.


def _comparable_parts(
    runs: Sequence[StudyRun], baselines: Mapping[str, str], label_by: Sequence[str], unit: str
) -> Parts:
    """Return one part, or one part per combination of label values.

    A run that differs in an observed fact or in code from its part's first run of its variant in
    ``baselines`` loses its result. Runs without a result are listed in the first part. Raises
    ConfigError if ``label_by`` contains an unknown field.
    """
    finished = [record for record, outcome in runs if outcome.loss is not None]
    grouped: dict[tuple[str, ...], list[RunRecord]] = {}
    for record, label in zip(finished, _labels(finished, label_by), strict=True):
        grouped.setdefault(label, []).append(record)
    parts: list[tuple[Labels, list[StudyRun]]] = [
        (dict(zip(label_by, values, strict=True)), _compared(group, baselines, unit))
        for values, group in grouped.items()
    ] or [({}, [])]
    parts[0][1].extend(each for each in runs if each[1].loss is None)
    return parts


def _compared(
    records: Sequence[RunRecord], baselines: Mapping[str, str], unit: str
) -> list[StudyRun]:
    references: dict[str, RunRecord] = {}
    for record in reversed(records):
        references[planned_run(record).variant.text] = record
    for record in reversed(records):
        variant = planned_run(record).variant
        if variant.slug == baselines.get(variant.text):
            references[variant.text] = record
    runs = []
    for record in records:
        reference, outcome = references[planned_run(record).variant.text], run_outcome(record, unit)
        facts = recorded_facts(reference), recorded_facts(record)
        if mismatches := observed_differences(*facts, unit):
            fields = tuple(difference.field for difference in mismatches)
            details = f"against {planned_run(reference).label}: {'; '.join(map(str, mismatches))}"
            state = f"not comparable: {', '.join(fields)}"
            outcome = absent_outcome(record, state, details, fields)
        runs.append((record, outcome))
    return runs


def _labels(records: Sequence[RunRecord], label_by: Sequence[str]) -> list[tuple[str, ...]]:
    if not records or not label_by:
        return [()] * len(records)
    shared = sorted(set.intersection(*(set(record.sources) for record in records)))
    labels: list[tuple[str, ...]] = []
    for record in records:
        facts = recorded_facts(record)
        try:
            values = {name: facts.value(name) for name in label_by}
        except KeyError as error:
            known = f"a symbol or field of {planned_run(record).label}"
            what = f"unknown field {error.args[0]!r} (expected {known})"
            raise ConfigError(Problem(what, "LABEL_BY", code="usage.unknown-field")) from None
        if "code" in values:
            values["code"] = code_digest(facts.sources, shared)
        labels.append(tuple(map(str, values.values())))
    return labels


# Verdicts.


def _judged_parts(parts: Parts, variants: Sequence[RunVariant], plan: VerdictPlan) -> StudyVerdicts:
    """Declare the look that is due, if the plan takes looks, and return the verdicts."""
    compared = variants if plan.judged else []
    contrasts = contrasts_of(compared, plan.against, plan.interactions)
    effects = design_effects(compared, plan.interactions)
    judged: list[StudyPart] = []
    controls: list[StudyPart] = []
    for labels, runs in parts:
        outcomes: dict[str, list[SeedOutcome]] = {}
        for record, outcome in runs:
            outcomes.setdefault(planned_run(record).variant.slug, []).append(outcome)
        judged.append((_prefix(labels), contrasts, outcomes))
        controls.append((_prefix(labels), control_contrasts(compared), outcomes))
    listed = [each for _, runs in parts for each in runs]
    results = [record for record, outcome in listed if outcome.loss is not None]
    evaluation_set = _evaluation_set(results, plan.unit)
    if plan.looks is not None:
        planned = [planned_run(record) for record, _ in reversed(listed)]
        configs = {run.variant.slug: run.config for run in planned}
        digests = {slug: configuration_digest(c.identity()) for slug, c in configs.items()}
        plan = replace(plan, configurations={**digests, **plan.configurations})
    plan = declare(plan, judged, evaluation_set)
    others: list[str] = []
    if plan.folder is not None:
        others = studies_on(evaluation_set, plan.folder, plan.configurations)
    return StudyVerdicts(judged, plan, controls, effects, evaluation_set, others)


def _evaluation_set(results: Sequence[RunRecord], unit: str) -> str:
    """Return the digest of the evaluation documents of the runs; "" if they differ."""
    facts = map(recorded_facts, results)
    digests = {str(f.observed["documents"]) if unit == NATS else f.text for f in facts}
    return digests.pop() if len(digests) == 1 else ""


def _prefix(labels: Labels) -> str:
    """Return the beginning of the names of a labelled part in verdicts."""
    return "".join(f"{value}:" for value in labels.values())


# Notes.


def _notes(study: str, runs: Sequence[StudyRun], stale: Collection[Path]) -> list[str]:
    results = [record for record, outcome in runs if outcome.loss is not None]
    reasons: dict[str, list[str]] = {}
    for record, outcome in runs:
        if outcome.loss is None and outcome.details:
            reason = f"{outcome.reason}: {outcome.details}"
            reasons.setdefault(reason, []).append(planned_run(record).label)
    notes = [f"{format_runs(labels)}: {reason}" for reason, labels in reasons.items()]
    if other := [planned_run(r).label for r in results if r.run.path in stale]:
        notes.append(f"{format_runs(other)}: stale, made by other code")
    if unstable := [record for record in results if unstable_steps(record)]:
        labels = format_runs([planned_run(record).label for record in unstable])
        notes.append(f"{labels}: {instability_text(unstable_steps(unstable[0]))}")
    notes += [f"{planned_run(r).label}: {note}" for r in results for note in _remarks(r)]
    planned = [planned_run(record) for record in results]
    reused = [run for run in planned if run.path.parts[-2:] != (study, run.name)]
    return notes + [f"{r.label}: reuses run {r.path.parent.name}/{r.path.name}" for r in reused]


def _remarks(record: RunRecord) -> list[str]:
    """Return remarks on the run that hold even if every run of the table shares them."""
    observed, (_, damage) = recorded_facts(record).observed, run_utilisation(record)
    edited, fallbacks = observed["changed_during_run"], observed["oom_fallbacks"]
    divisions = observed["earlier_divisions"]
    notes = [f"code was edited during the run: {', '.join(edited)}"] if edited else []
    notes += [f"out of memory, fallbacks applied: {fallbacks}"] if fallbacks else []
    notes += [f"begun with another division of the batch: {divisions}"] if divisions else []
    return notes + [f"{damage}; figures of the machine are missing"] * bool(damage)


# Rows.


def row_runs(parts: Parts, variants: Sequence[RunVariant]) -> list[RowRuns]:
    """Return the runs of each variant that has a planned run in a part, part by part."""
    baselines = _baselines(variants)
    rows: list[RowRuns] = []
    for labels, runs in parts:
        by_slug: dict[str, list[StudyRun]] = {}
        for record, outcome in sorted(runs, key=lambda each: each[1].seed):
            by_slug.setdefault(planned_run(record).variant.slug, []).append((record, outcome))
        of_part = {
            v.slug: RowRuns(v, labels, by_slug[v.slug]) for v in variants if v.slug in by_slug
        }
        for slug, row in of_part.items():
            baseline = baselines.get(row.variant.text, "")
            other = of_part.get(baseline) if baseline != slug else None
            rows.append(replace(row, baseline=other, parent=of_part.get(row.variant.parent)))
    return rows


def row_document(
    row: RowRuns, study: StudyVerdicts | None = None, stale: Collection[Path] = ()
) -> dict[str, Any]:
    """Return one row of the table: name, losses, differences, costs, and the runs behind them."""
    variant, records = row.variant, row.records
    loss, loss_sd, n = (None, None, 0) if row.diverged else sample(list(row.losses.values()))
    verdicts = _verdicts(row, study) if study else {"baseline": None, "parent": None}
    origins = [run_origin(record) for record in records]
    in_nats = study is None or study.plan.unit == NATS
    return {
        "number": variant.number,
        "slug": variant.slug,
        "parent": variant.parent or None,
        "name": row.name,
        "title": variant.title,
        "control": "a/a" if variant.is_aa else "repeat" if variant.is_repeat else None,
        "changes": dict(variant.delta or {}),
        "levels": dict(variant.levels or {}),
        "labels": dict(row.labels),
        "n": n,
        "val_loss": loss,
        "val_loss_sd": loss_sd,
        # exp(mean loss): the geometric mean of the seeds' perplexities.
        "perplexity": _perplexity(loss) if in_nats else None,
        **_difference("baseline", row, row.baseline),
        **_verdict_figures("baseline", verdicts["baseline"]),
        **_difference("parent", row, row.parent),
        **_verdict_figures("parent", verdicts["parent"]),
        "comparisons": verdicts["baseline"] and verdicts["baseline"]["planned_comparisons"],
        "against": {kind: v and v["name"] for kind, v in verdicts.items()},
        "parameters": records[0].final.parameters if records else None,
        "tokens": _mean([record.final.tokens for record in records]),
        "train_seconds": _mean([record.timing.train_seconds for record in records]),
        "sparsity": _mean([record.final.sparsity for record in records]),
        "machine": mean_over_seeds([run_utilisation(record)[0] for record in records]),
        "state": _state(row, stale),
        "runs": [record.run.path.name for record in records],
        "run_ids": [origin["run_id"] for origin in origins],
        "configurations": [origin["configuration"] for origin in origins],
        "commits": list(dict.fromkeys(origin["commit"] or UNKNOWN for origin in origins)),
    }


def sample(values: Sequence[float]) -> tuple[float | None, float | None, int]:
    """Return mean, sample standard deviation (None of one value) and number of the values."""
    sd = statistics.stdev(values) if len(values) > 1 else None
    return _mean(values), sd, len(values)


def _difference(kind: str, row: RowRuns, other: RowRuns | None) -> dict[str, Any]:
    """Return the difference from the other row over the seeds of both; none if a seed diverged."""
    gaps: list[float] = []
    if other is not None and not (row.diverged or other.diverged):
        losses = row.losses.items()
        gaps = [loss - other.losses[seed] for seed, loss in losses if seed in other.losses]
    names = (f"delta_{kind}", f"delta_{kind}_sd", f"delta_{kind}_n")
    return dict(zip(names, sample(gaps), strict=True))


def _verdicts(row: RowRuns, study: StudyVerdicts) -> dict[str, Mapping[str, Any] | None]:
    verdicts = [v for v in (*study.verdicts, *study.aa_steps) if v["step"] == row.name]
    parent = f"{_prefix(row.labels)}{row.variant.parent}"
    return {
        "baseline": next((v for v in verdicts if v["role"] in ("baseline", AA_ROLE)), None),
        "parent": next((v for v in reversed(verdicts) if v["reference"] == parent), None),
    }


def _verdict_figures(name: str, verdict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return word, 95 % interval, corrected p and p of the own test; no test gives none of these."""
    low, high = (verdict and verdict["interval_95"]) or (None, None)
    return {
        f"{name}_verdict": verdict and verdict["verdict"],
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_p": verdict and verdict["p_of_word"],
        f"{name}_p_own": verdict and verdict["p_own"],
    }


def _state(row: RowRuns, stale: Collection[Path]) -> str:
    """Return "done", the states of unfinished runs, and "stale" if a run was made by other code."""
    done, total = len(row.records), len(row.runs)
    word = "stale" if any(record.run.path in stale for record in row.records) else "done"
    parts = [word if done == total else f"{done} of {total} {word}"] if done else []
    if unstable := sum(bool(unstable_steps(record)) for record in row.records):
        # Only finished runs are counted, and a narrow terminal has no columns for two words.
        parts = [part for part in parts if part != "done"]
        parts.append("UNSTABLE" if unstable == done else f"UNSTABLE {unstable}/{done}")
    absent = {outcome.reason for _, outcome in row.runs if outcome.loss is None}
    return ", ".join([*parts, *sorted(absent)])


def _perplexity(loss: float | None) -> float | None:
    """Return exp(loss); None if there is no loss or the result overflows."""
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
