"""The runs of a study, read and judged once, and the document of everything that is shown of them.

The document is a dictionary of JSON types, which all renderings show and which is never read back: a
row per variant, a run per planned run, and a verdict per comparison (null without a word). Losses and
differences are in ``unit``; a value that is not known is null.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem
from lib.report.contrasts import (
    AA_ROLE,
    Contrast,
    contrasts_of,
    control_contrasts,
    design_effects,
    scale_of,
)
from lib.report.declarations import Look, VerdictPlan, line_record, studies_on
from lib.report.judge import declare, judge
from lib.report.options import NATS, UNITS, sum_of_shares
from lib.report.run_facts import (
    code_digest,
    field_value,
    observed_differences,
    observed_facts,
    text_digest,
)
from lib.report.run_results import (
    absent_outcome,
    mean_over_seeds,
    read_records,
    run_origin,
    run_outcome,
    run_utilisation,
)
from lib.report.statistics import INTERVAL_ERROR, noisier_than_others
from lib.report.verdicts import Outcomes, SeedOutcome, VerdictWord
from lib.runs.identity import configuration_digest
from lib.runs.record import UNKNOWN, RunRecord
from lib.runs.run import Run, RunVariant
from lib.tracking.stability import instability_text, unstable_steps
from lib.units import format_runs

VERDICTS_FILE = "verdicts.json"
SCHEMA_VERSION = 5
# Note on a study without verdicts.
NOT_JUDGED = "no verdicts: the file of the study has judge = false"
Verdicts = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class JudgedStudy:
    """The runs of a study, read and judged once."""

    name: str
    plan: VerdictPlan
    # In the order of the plan, also those without a result.
    records: Sequence[RunRecord]
    # Name of a row (labels and variant) → its runs by seed.
    outcomes: Outcomes
    # Of ``lib.report.judge``, on all runs of the study.
    judged: Mapping[str, Any]
    # Directories of the runs that were made by other code.
    stale: Collection[Path] = ()
    evaluation_set: str = ""
    # Other studies that were judged on the same documents.
    same_documents: Sequence[str] = ()

    @cached_property
    def variants(self) -> list[RunVariant]:
        return _variants(self.records)

    @property
    def finished(self) -> list[RunRecord]:
        """Return all finished runs: also those that are not comparable."""
        return [r for r in self.records if run_outcome(r, self.plan.unit).loss is not None]

    @cached_property
    def listed(self) -> list[SeedOutcome]:
        by_path = {o.run.path: o for runs in self.outcomes.values() for o in runs}
        return [by_path[r.run.path] for r in self.records if r.run.path in by_path]

    def of_runs(self, shown: Collection[Path]) -> "JudgedStudy":
        """Return the part with the rows of the directories ``shown``, judged among all."""
        outcomes = {
            arm: [o for o in runs if o.run.path in shown] for arm, runs in self.outcomes.items()
        }
        outcomes = {arm: runs for arm, runs in outcomes.items() if runs}
        verdicts = {
            name: [v for v in self.judged[name] if v["weights"].keys() <= outcomes.keys()]
            for name in ("verdicts", "aa_steps")
        }
        gain = pairing_gain(self.judged["verdicts"])
        return replace(
            self, outcomes=outcomes, judged={**self.judged, "pairing_gain": gain, **verdicts}
        )

    def references(self, arm: str) -> tuple[str, str]:
        """Return the rows of baseline and parent of a row; "" if there is none."""
        variant, labels = self.outcomes[arm][0].run.variant, self.outcomes[arm][0].labels
        baseline = f"{_prefix(labels)}{_baselines(self.variants).get(variant.text, '')}"
        parent = f"{_prefix(labels)}{variant.parent}"
        return (
            baseline if baseline in self.outcomes and baseline != arm else "",
            parent if parent in self.outcomes else "",
        )


def read_study(
    name: str,
    runs: Sequence[Run[Any]],
    plan: VerdictPlan | None = None,
    label_by: Sequence[str] = (),
    is_stale: Callable[[RunRecord], object] = lambda record: False,
) -> JudgedStudy:
    """Read the directories of ``runs`` and return the study, judged under the rule of ``plan``.

    A run that differs from the baseline in more than its variant's settings is not comparable, unless
    ``label_by`` lists the differing fields: then it gets a separate row labelled with their values.
    Raises ConfigError if it lists an unknown field, or no run has a result to label.
    """
    plan = plan or VerdictPlan()
    records = read_records(runs, plan.unit)
    variants, parts = _variants(records), _parts(records, label_by, plan.unit)
    outcomes: dict[str, list[SeedOutcome]] = {}
    for part, listed in parts.items():
        for variant in variants:
            own = [outcome for outcome in listed if outcome.run.variant.slug == variant.slug]
            if own:
                outcomes[f"{part}{variant.slug}"] = sorted(own, key=lambda outcome: outcome.seed)
    contrasts = [c.in_part(part) for part in parts for c in planned_contrasts(variants, plan)]
    finished = [record for each in outcomes.values() for record in finished_of(each)]
    evaluation_set = _evaluation_set(finished, plan.unit)
    configs = {run.variant.slug: run.config for run in reversed(runs)}
    digests = {slug: configuration_digest(c.identity()) for slug, c in configs.items()}
    plan = replace(plan, configurations={**digests, **plan.configurations})
    plan = declare(plan, contrasts, outcomes, evaluation_set)
    others: list[str] = []
    if plan.folder is not None:
        others = studies_on(evaluation_set, plan.folder, plan.configurations)
    judged = judge(contrasts, outcomes, plan)
    stale = {
        record.run.path
        for record in records
        if run_outcome(record, plan.unit).loss is not None and is_stale(record)
    }
    return JudgedStudy(name, plan, records, outcomes, judged, stale, evaluation_set, others)


def planned_contrasts(variants: Sequence[RunVariant], plan: VerdictPlan) -> list[Contrast]:
    """Return the comparisons of ``variants`` and their controls; none if the study is not judged."""
    compared = contrasts_of(variants, plan.against, plan.interactions)
    return [*compared, *control_contrasts(variants)] if plan.judged else []


def _variants(records: Sequence[RunRecord]) -> list[RunVariant]:
    runs = [record.planned for record in records]
    return list({r.variant.slug: r.variant for r in runs if isinstance(r, Run)}.values())


def _baselines(variants: Sequence[RunVariant]) -> dict[str, str]:
    """Return the text that an evaluation predicts → slug of its first variant without a parent."""
    return {v.text: v.slug for v in reversed(variants) if not v.parent}


def _prefix(labels: Mapping[str, str]) -> str:
    return "".join(f"{value}:" for value in labels.values())


# Which runs can be compared.


def _parts(
    records: Sequence[RunRecord], label_by: Sequence[str], unit: str
) -> dict[str, list[SeedOutcome]]:
    """Return the outcomes of one part, or of one part per combination of label values.

    A run that differs in an observed fact or in code from its part's first run of the baseline loses
    its result. Runs without a result are in the first part.
    """
    outcomes = [run_outcome(record, unit) for record in records]
    finished = [record for record, o in zip(records, outcomes, strict=True) if o.loss is not None]
    if label_by and not finished:
        what = f"no run has a result to label by {', '.join(label_by)}"
        raise ConfigError(Problem(what, "LABEL_BY", "type: make", code="run.not-found"))
    grouped: dict[tuple[str, ...], list[RunRecord]] = {} if finished else {(): []}
    for record, values in zip(finished, _labels(finished, label_by), strict=True):
        grouped.setdefault(values, []).append(record)
    baselines = _baselines(_variants(records))
    absent = [outcome for outcome in outcomes if outcome.loss is None]
    parts = {}
    for values, group in grouped.items():
        labels = dict(zip(label_by, values, strict=True))
        listed = [*_compared(group, baselines, unit), *absent]
        parts[_prefix(labels)] = [replace(o, labels=labels) if labels else o for o in listed]
        absent = []
    return parts


def _compared(
    records: Sequence[RunRecord], baselines: Mapping[str, str], unit: str
) -> list[SeedOutcome]:
    outcomes = [run_outcome(record, unit) for record in records]
    references: dict[str, SeedOutcome] = {o.run.variant.text: o for o in reversed(outcomes)}
    for outcome in reversed(outcomes):
        variant = outcome.run.variant
        if variant.slug == baselines.get(variant.text):
            references[variant.text] = outcome
    compared = []
    for record, outcome in zip(records, outcomes, strict=True):
        reference = references[outcome.run.variant.text]
        if mismatches := observed_differences(reference.record, record, unit):
            fields = tuple(difference.field for difference in mismatches)
            details = f"against {reference.run.label}: {'; '.join(map(str, mismatches))}"
            state = f"not comparable: {', '.join(fields)}"
            outcome = absent_outcome(record, state, details, fields)
        compared.append(outcome)
    return compared


def _labels(records: Sequence[RunRecord], label_by: Sequence[str]) -> list[tuple[str, ...]]:
    if not label_by:
        return [()] * len(records)
    shared = sorted(set.intersection(*(set(record.sources) for record in records)))
    labels: list[tuple[str, ...]] = []
    for record in records:
        try:
            values = {name: field_value(record, name) for name in label_by}
        except KeyError as error:
            what = f"unknown field {error.args[0]!r} (expected a symbol or field of these runs)"
            raise ConfigError(Problem(what, "LABEL_BY", code="usage.unknown-field")) from None
        if "code" in values:
            values["code"] = code_digest(record.sources, shared)
        labels.append(tuple(map(str, values.values())))
    return labels


def _evaluation_set(results: Sequence[RunRecord], unit: str) -> str:
    """Return the digest of the evaluation documents of the runs; "" if they differ."""
    digests = {
        str(observed_facts(r)["documents"]) if unit == NATS else text_digest(r) for r in results
    }
    return digests.pop() if len(digests) == 1 else ""


# The document.


def study_document(study: JudgedStudy) -> dict[str, Any]:
    """Return what runs determine; ``gpt2/study/document.py`` adds what the plan determines."""
    plan, judged = study.plan, study.judged
    verdicts, looks, look_plan = judged["verdicts"], judged["looks"], judged["look_plan"]
    effects = design_effects(study.variants if plan.judged else (), plan.interactions)
    results = finished_of(study.listed)
    has_entropy = results and plan.unit == NATS
    spent = float(sum_of_shares([look.share for look in looks]))
    notes = judged["notes"] if plan.judged else [NOT_JUDGED]
    return {
        "metric": "val_loss",
        "rule": plan.rule_record,
        "is_declared_first": judged["is_declared_first"],
        "look_plan": {name: list(values) for name, values in asdict(look_plan).items()},
        "looks": [_look(*each) for each in zip(looks, judged["closed"], strict=True)],
        "alpha_spent": spent * plan.rule.alpha,
        "family": sorted(judged["family"]),
        "planned_comparisons": judged["planned"],
        "pairing_gain": judged.get("pairing_gain", pairing_gain(verdicts)),
        "not_estimable": effects and effects.not_estimable,
        "inflated_variances": effects and effects.inflated,
        "aa_failed": judged["aa_failed"],
        "evaluation_set": study.evaluation_set or None,
        "same_documents": study.same_documents,
        "repeats": judged["repeats"],
        "study": study.name,
        "unit": UNITS[plan.unit],
        # The loss of a model that predicts token frequencies only.
        "unigram_entropy": results[0].final.unigram_entropy if has_entropy else None,
        "verdicts": verdicts,
        "aa_steps": judged["aa_steps"],
        "exploratory": plan.exploratory,
        "noise": _noise(verdicts) if plan.rule.variance == "shared" else [],
        "divergence_limit": _divergence_limit(verdicts),
        "rows": [_row(study, arm) for arm in study.outcomes],
        "runs": _runs(study),
        "notes": [*notes, *_notes(study)],
    }


def _look(look: Look, closed: frozenset[str]) -> dict[str, Any]:
    record = line_record(look) | {"closed": sorted(closed), "family": sorted(look.family)}
    del record["kind"], record["at"]
    return record


def pairing_gain(verdicts: Verdicts) -> float | None:
    """Return the share of the variance that pairing by seed removes, over all tested step contrasts:
    one has too few seeds for this figure.
    """
    paired, separate = 0.0, 0.0
    for verdict in verdicts:
        if verdict["p"] is not None and len(verdict["values"]) == 2:
            paired += verdict["sd"] ** 2
            separate += sum(statistics.stdev(losses) ** 2 for losses in verdict["values"].values())
    return 1 - paired / separate if separate else None


def _noise(verdicts: Verdicts) -> list[dict[str, Any]]:
    """Return the comparisons whose variance hides the others under the rule shared."""
    deviations = {
        v["name"]: v["sd"] / math.sqrt(scale_of(v["weights"]))
        for v in verdicts
        if v["p"] is not None and v["sd"]
    }
    noisy = noisier_than_others(deviations).items()
    return [{"comparison": name, "factor": factor} for name, factor in noisy]


def _divergence_limit(verdicts: Verdicts) -> dict[str, Any] | None:
    """Return the largest rate of divergences that n seeds without one leave open, at 95 %:
    1 - 0.05^(1/n). None if a seed diverged or nothing was tested.
    """
    tested = [v for v in verdicts if v["p"] is not None]
    if not tested or any(v["verdict"] is VerdictWord.DIVERGED for v in verdicts):
        return None
    n = min(v["n"] for v in tested)
    return {"n": n, "rate": 1 - INTERVAL_ERROR ** (1 / n)}


def _runs(study: JudgedStudy) -> list[dict[str, Any]]:
    runs = []
    for outcome in (each for runs_of_row in study.outcomes.values() for each in runs_of_row):
        run, is_absent = outcome.run, outcome.loss is None
        entry = {
            "label": run.label,
            "folder": run.path.name,
            "variant": run.variant.slug,
            "labels": dict(outcome.labels),
            "seed": run.seed,
            "state": outcome.reason if is_absent else "done",
            "reason": outcome.details,
            "diverged": outcome.diverged,
            "unstable": outcome.unstable,
            "val_loss": outcome.loss,
            **({} if is_absent else run_origin(outcome.record)),
            "configuration": run.config.hash8,
        }
        runs.append((run.variant.number or 0, run.label, entry))
    return [entry for _, _, entry in sorted(runs, key=lambda each: each[:2])]


def _notes(study: JudgedStudy) -> list[str]:
    """Return remarks on single runs, such as failures, that hold even if all runs share them."""
    results = [outcome for outcome in study.listed if outcome.loss is not None]
    reasons: dict[str, list[str]] = {}
    for outcome in study.listed:
        if outcome.loss is None and outcome.details:
            reason = f"{outcome.reason}: {outcome.details}"
            reasons.setdefault(reason, []).append(outcome.run.label)
    stale = [o.run.label for o in results if o.run.path in study.stale]
    if stale:
        reasons["stale, made by other code"] = stale
    if unstable := [o for o in results if o.unstable]:
        text = instability_text(unstable_steps(unstable[0].record))
        reasons[text] = [o.run.label for o in unstable]
    notes = [f"{format_runs(labels)}: {reason}" for reason, labels in reasons.items()]
    for outcome in results:
        observed = observed_facts(outcome.record)
        _, damage = run_utilisation(outcome.record)
        edited, fallbacks = observed["changed_during_run"], observed["oom_fallbacks"]
        divisions = observed["earlier_divisions"]
        remarks = [f"code was edited during the run: {', '.join(edited)}"] if edited else []
        remarks += [f"out of memory, fallbacks applied: {fallbacks}"] if fallbacks else []
        remarks += [f"begun with another division of the batch: {divisions}"] if divisions else []
        remarks += [f"{damage}; figures of the machine are missing"] if damage else []
        notes += [f"{outcome.run.label}: {remark}" for remark in remarks]
    runs = [outcome.run for outcome in results]
    reused = [run for run in runs if run.path.parts[-2:] != (study.name, run.name)]
    return notes + [f"{r.label}: reuses run {r.path.parent.name}/{r.path.name}" for r in reused]


# Rows.


def finished_of(runs: Sequence[SeedOutcome]) -> list[RunRecord]:
    """Return the runs with a comparable result."""
    return [outcome.record for outcome in runs if outcome.loss is not None]


def _row(study: JudgedStudy, arm: str) -> dict[str, Any]:
    """Return one row of the table: name, losses, differences, costs, and the runs behind them."""
    judged, runs = study.judged, study.outcomes[arm]
    variant, labels = runs[0].run.variant, runs[0].labels
    found = [v for v in (*judged["verdicts"], *judged["aa_steps"]) if v["step"] == arm]
    parent = f"{_prefix(labels)}{variant.parent}"
    baseline = next((v for v in found if v["role"] in ("baseline", AA_ROLE)), None)
    verdicts = {
        "baseline": baseline,
        "parent": next((v for v in reversed(found) if v["reference"] == parent), None),
    }
    records = finished_of(runs)
    origins, losses = [run_origin(record) for record in records], _losses(runs)
    figures = _sample("val_loss", list(losses.values()), "n")
    loss = figures["val_loss"]
    for (kind, verdict), other in zip(verdicts.items(), study.references(arm), strict=True):
        first = _losses(study.outcomes.get(other, ()))
        gaps = [loss - first[seed] for seed, loss in losses.items() if seed in first]
        low, high = (verdict and verdict["interval_95"]) or (None, None)
        figures |= {
            **_sample(f"delta_{kind}", gaps, f"delta_{kind}_n"),
            f"{kind}_verdict": verdict and verdict["verdict"],
            f"{kind}_low": low,
            f"{kind}_high": high,
            f"{kind}_p": verdict and verdict["p_of_word"],
            f"{kind}_p_own": verdict and verdict["p_own"],
        }
    return {
        "number": variant.number,
        "slug": variant.slug,
        "parent": variant.parent or None,
        "name": arm,
        "title": variant.title,
        "control": "a/a" if variant.is_aa else "repeat" if variant.is_repeat else None,
        "changes": dict(variant.delta or {}),
        "levels": dict(variant.levels or {}),
        "labels": dict(labels),
        **_weights(records),
        **figures,
        # exp(mean loss): the geometric mean of the seeds' perplexities.
        "perplexity": _perplexity(loss) if study.plan.unit == NATS else None,
        "comparisons": baseline and baseline["planned_comparisons"],
        "against": {kind: v and v["name"] for kind, v in verdicts.items()},
        "parameters": records[0].final.parameters if records else None,
        "tokens": _mean([record.final.tokens for record in records]),
        "train_seconds": _mean([record.timing.train_seconds for record in records]),
        "sparsity": _mean([record.final.sparsity for record in records]),
        "machine": mean_over_seeds([run_utilisation(record)[0] for record in records]),
        "state": _state(runs, study.stale),
        "runs": [record.run.path.name for record in records],
        "run_ids": [origin["run_id"] for origin in origins],
        "configurations": [origin["configuration"] for origin in origins],
        "commits": list(dict.fromkeys(origin["commit"] or UNKNOWN for origin in origins)),
    }


def _weights(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return how trained weights are stored; nothing if none are known."""
    facts = [observed_facts(record) for record in records]
    schemes = {
        str(each["knobs.quantization_scheme"])
        for each in facts
        if "knobs.quantization_scheme" in each
    }
    return {"weights": ", ".join(sorted(schemes))} if schemes else {}


def _losses(runs: Sequence[SeedOutcome]) -> dict[int, float]:
    """Return the losses; none if a seed diverged, as the finished ones are a biased sample then."""
    diverged = any(outcome.diverged for outcome in runs)
    return {o.seed: o.loss for o in runs if o.loss is not None and not diverged}


def _sample(name: str, values: Sequence[float], number: str) -> dict[str, Any]:
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {name: _mean(values), f"{name}_sd": sd, number: len(values)}


def _state(runs: Sequence[SeedOutcome], stale: Collection[Path]) -> str:
    """Return "done", the states of unfinished runs, and "stale" if a run was made by other code."""
    results = [outcome for outcome in runs if outcome.loss is not None]
    done, total = len(results), len(runs)
    word = "stale" if any(outcome.run.path in stale for outcome in results) else "done"
    parts = [word if done == total else f"{done} of {total} {word}"] if done else []
    if unstable := sum(outcome.unstable for outcome in results):
        # Only finished runs are counted, and a narrow terminal has no columns for two words.
        parts = [part for part in parts if part != "done"]
        parts.append("UNSTABLE" if unstable == done else f"UNSTABLE {unstable}/{done}")
    return ", ".join([*parts, *sorted({o.reason for o in runs if o.loss is None})])


def _perplexity(loss: float | None) -> float | None:
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
