"""The document of a study: everything that its table, page, figures and claims show, as plain values.

A dictionary of JSON types. Terminal, Markdown, CSV, LaTeX, page and figures render it and compute
nothing. It is written as ``verdicts.json`` and never read back; the curves, which are long, are in
``lib.report.series`` and only drawn. Losses and differences are in ``unit``; a value that is not known is
null.

``rows``: one per variant, with losses, differences, costs and the runs behind them; ``against`` names
its comparisons with baseline and parent in ``verdicts``, or for an A/A step in ``aa_steps``.
``runs``: one per planned run, with its origin or the reason why it has no result.
``verdicts``: one per comparison; ``verdict`` is null if there is no word, and ``p_of_word`` is the
corrected p on which the word rests.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lib.report.contrasts import REPEAT_ROLE, scale_of
from lib.report.declarations import Look, declaration_record
from lib.report.options import UNITS
from lib.report.run_facts import code_digest, recorded_facts
from lib.report.run_results import planned_run, run_origin
from lib.report.statistics import INTERVAL_ERROR, noisier_than_others
from lib.report.study_verdicts import StudyVerdicts
from lib.report.table import ResultTable, RowRuns
from lib.report.verdicts import SeedOutcome, VerdictWord
from lib.runs.record import UNKNOWN, RunRecord

SCHEMA_VERSION = 5
# Conditions of a row that must be those of the first one unless its step declares them.
_CONDITIONS = {
    "data": "data",
    "documents": "documents",
    "torch": "torch",
    "device": "device",
    "precision": "knobs.precision_mode",
    "kernel": "attention",
}
_DIGEST_CHARS = 8


def study_document(table: ResultTable, context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of the study.

    ``context`` has the parts that follow from the plan: ``title``, sentences of the ``question``,
    training ``flops`` per token by variant, ``settings`` that are not defaults (symbol, value,
    source), and ``commands`` (command, purpose).
    """
    study, flops = table.verdicts, context["flops"]
    schedule, effects = study.schedule, study.effects
    looks = zip(study.looks, study.closed, strict=True)
    return {
        "metric": "val_loss",
        "rule": study.plan.rule_record,
        "is_declared_first": study.is_declared_first,
        "look_plan": schedule and asdict(schedule.plan),
        "looks": [_look_record(look, closed) for look, closed in looks],
        "alpha_spent": schedule and schedule.spent * study.plan.rule.alpha,
        "family": sorted(study.family),
        "planned_comparisons": study.planned,
        "pairing_gain": pairing_gain(study.judged),
        "not_estimable": effects and effects.not_estimable,
        "inflated_variances": effects and effects.inflated,
        "aa_failed": study.aa_failed,
        "evaluation_set": study.evaluation_set or None,
        "same_documents": study.same_documents,
        "repeats": _repeats(study),
        "study": table.study,
        "title": context["title"],
        "question": list(context["question"]),
        "unit": UNITS[study.plan.unit],
        "unigram_entropy": table.unigram_entropy,
        "verdicts": list(study.verdicts),
        "aa_steps": list(study.aa_steps),
        "exploratory": study.plan.exploratory,
        "noise": _noise(study),
        "divergence_limit": _divergence_limit(study),
        "rows": [{**row, "flops_per_token": flops.get(row["slug"])} for row in table.rows],
        "runs": _runs(table),
        "conditions": [_conditions(row) for row in table.runs if row.records],
        "sections": [asdict(section) for section in table.sections],
        "left_out": list(table.left_out),
        "notes": list(table.notes),
        "settings": [list(setting) for setting in context["settings"]],
        "commands": [list(command) for command in context["commands"]],
    }


def _look_record(look: Look, closed: frozenset[str]) -> dict[str, Any]:
    record = declaration_record(look) | {"closed": sorted(closed), "family": sorted(look.family)}
    del record["kind"], record["at"]
    return record


def pairing_gain(verdicts: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the variance that pairing by seed removes, over all step contrasts.

    None without a tested contrast of two runs. One contrast has too few seeds for this figure.
    """
    paired, separate = 0.0, 0.0
    for verdict in verdicts:
        if verdict["p"] is not None and len(verdict["values"]) == 2:
            paired += verdict["sd"] ** 2
            separate += sum(statistics.stdev(losses) ** 2 for losses in verdict["values"].values())
    return 1 - paired / separate if separate else None


def _repeats(study: StudyVerdicts) -> dict[str, dict[int, float]]:
    """Return the differences of each repeat to the first training of its seeds."""
    repeats: dict[str, dict[int, float]] = {}
    for contrast in study.controls.values():
        if contrast.role == REPEAT_ROLE:
            again, first = (
                {run.seed: run.loss for run in study.outcomes.get(arm, ())}
                for arm in (contrast.step, contrast.reference)
            )
            repeats[contrast.step] = {
                seed: loss - before
                for seed, loss in sorted(again.items())
                if loss is not None and (before := first.get(seed)) is not None
            }
    return repeats


def _noise(study: StudyVerdicts) -> list[dict[str, Any]]:
    """Return the comparisons whose variance hides the others under the rule shared.

    ``factor`` is the ratio of its deviation to the root of the mean variance of the others.
    """
    if study.plan.rule.variance != "shared":
        return []
    deviations = {
        v["name"]: v["sd"] / math.sqrt(scale_of(v["weights"]))
        for v in study.verdicts
        if v["p"] is not None and v["sd"]
    }
    noisy = noisier_than_others(deviations).items()
    return [{"comparison": name, "factor": factor} for name, factor in noisy]


def _divergence_limit(study: StudyVerdicts) -> dict[str, Any] | None:
    """Return the largest rate of divergences that n seeds without one leave open, at 95 %.

    The rate is 1 - 0.05^(1/n). None if a seed diverged or nothing was tested.
    """
    tested = [v for v in study.verdicts if v["p"] is not None]
    if not tested or any(v["verdict"] is VerdictWord.DIVERGED for v in study.verdicts):
        return None
    n = min(v["n"] for v in tested)
    return {"n": n, "rate": 1 - INTERVAL_ERROR ** (1 / n)}


def _runs(table: ResultTable) -> list[dict[str, Any]]:
    runs = [_run(*each, row) for row in table.runs for each in row.runs]
    numbers = {row.variant.slug: row.variant.number or 0 for row in table.runs}
    return sorted(runs, key=lambda run: (numbers[run["variant"]], run["label"]))


def _run(record: RunRecord, outcome: SeedOutcome, row: RowRuns) -> dict[str, Any]:
    run, is_absent = planned_run(record), outcome.loss is None
    return {
        "label": run.label,
        "folder": run.path.name,
        "variant": run.variant.slug,
        "labels": dict(row.labels),
        "seed": run.seed,
        "state": outcome.reason if is_absent else "done",
        "reason": outcome.details,
        "diverged": outcome.diverged,
        "unstable": outcome.unstable,
        "val_loss": outcome.loss,
        **({} if is_absent else run_origin(record)),
        "configuration": run.config.hash8,
    }


def _conditions(row: RowRuns) -> dict[str, Any]:
    """Return the distinct values, over the seeds of a row, of what must not differ in silence."""
    facts = [recorded_facts(record) for record in row.records]
    values = {
        name: list(dict.fromkeys(str(each.observed.get(field, UNKNOWN)) for each in facts))
        for name, field in _CONDITIONS.items()
    }
    sources = {id(each.sources): each.sources for each in facts}.values()
    code = dict.fromkeys(code_digest(each, each)[:_DIGEST_CHARS] for each in sources)
    return {
        "name": row.name,
        **values,
        "code": list(code),
        "seeds": [planned_run(record).seed for record in row.records],
    }
