"""The document of a study: everything that its table, page, figures and claims show, as plain values.

A dictionary of JSON types. Terminal, Markdown, CSV, LaTeX, page and figures render it and compute
nothing. It is written as ``verdicts.json`` and never read back; the curves, which are long, are in
``study_series`` and only drawn. Losses and differences are in ``unit``; a value that is not known is
null.

``rows``: one per variant, with losses, differences, costs and the runs behind them; ``against`` names
its comparisons with baseline and parent in ``verdicts``, or for an A/A step in ``aa_steps``.
``runs``: one per planned run, with its origin or the reason why it has no result.
``verdicts``: one per comparison; ``verdict`` is null if there is no word, and ``p_of_word`` is the
corrected p on which the word rests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lib.json_files import MissingRecord, RecordError
from lib.report.contrast_tests import INTERVAL_ERROR, SPREAD_VARIANCES, mean_of
from lib.report.options import UNITS
from lib.report.run_facts import code_digest
from lib.report.run_results import MissingResult, RunResult
from lib.report.series import (
    RowRuns,
    SeedBand,
    document_differences,
    evaluation_curves,
    evaluation_differences,
    final_statistics,
    runs_of_rows,
    statistics_curves,
    training_curves,
    training_differences,
)
from lib.report.significance import DriftTest
from lib.report.study_verdicts import StudyVerdicts, verdicts_record
from lib.report.table import ResultTable, TableRow, marginal_effects
from lib.report.verdicts import ContrastVerdict, VerdictWord
from lib.runs.record import UNKNOWN

SCHEMA_VERSION = 4
# With fewer other comparisons, a mean variance says little.
_MIN_OTHERS = 3
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
    source), ``commands`` (command, purpose), and ``other_folders`` (name, state).
    """
    study, flops = table.verdicts, context["flops"]
    rows = [row_document(row, flops.get(row.variant.slug)) for row in table.rows]
    return {
        **verdicts_record(study),
        "study": table.study,
        "title": context["title"],
        "question": list(context["question"]),
        "unit": UNITS[study.plan.unit],
        "unigram_entropy": table.unigram_entropy,
        "verdicts": [_verdict(verdict) for verdict in study.verdicts],
        "aa_steps": [_verdict(verdict) for verdict in study.aa_steps],
        "exploratory": study.plan.exploratory,
        "noise": _noise(study),
        "divergence_limit": _divergence_limit(study),
        "same_documents": study.on_same_documents,
        "drift": study.drift and _drift(study.drift),
        "speed_drifts": {device: _drift(test) for device, test in study.speed_drifts.items()},
        "rows": rows,
        "runs": _runs(table),
        "conditions": [_conditions(row) for row in runs_of_rows(table) if row.results],
        "marginals": [asdict(marginal) for marginal in marginal_effects(table.rows)],
        "sections": [asdict(section) for section in table.sections],
        "left_out": list(table.left_out),
        "notes": list(table.notes),
        "settings": [list(setting) for setting in context["settings"]],
        "commands": [list(command) for command in context["commands"]],
        "other_folders": [list(folder) for folder in context["other_folders"]],
    }


def row_document(row: TableRow, flops_per_token: float | None) -> dict[str, Any]:
    """Return one row of the table: name, losses, differences, costs, and the runs behind them."""
    variant = row.variant
    verdicts = {"baseline": row.verdict_baseline, "parent": row.verdict_parent}
    return {
        **row_figures(row),
        "name": row.name,
        "title": variant.title,
        "control": "a/a" if variant.is_aa else "repeat" if variant.is_repeat else None,
        "changes": dict(variant.delta or {}),
        "levels": dict(variant.levels or {}),
        "labels": dict(row.labels),
        "against": {kind: v and v.contrast.name for kind, v in verdicts.items()},
        "flops_per_token": flops_per_token,
        **{name: list(values) for name, values in row.origins.items()},
        "sparsity_by_layer": dict(row.sparsity_by_layer),
        "machine": dict(row.machine),
    }


def row_figures(row: TableRow) -> dict[str, Any]:
    loss, baseline, parent = row.val_loss, row.delta_baseline, row.delta_parent
    return {
        "number": row.variant.number,
        "slug": row.variant.slug,
        "parent": row.variant.parent or None,
        "n": loss.n if loss else 0,
        "val_loss": loss and loss.mean,
        "val_loss_sd": loss and loss.sd,
        "perplexity": row.perplexity,
        "delta_baseline": baseline and baseline.mean,
        "delta_baseline_sd": baseline and baseline.sd,
        "delta_baseline_n": baseline.n if baseline else 0,
        **_verdict_figures("baseline", row.verdict_baseline),
        "delta_parent": parent and parent.mean,
        "delta_parent_sd": parent and parent.sd,
        "delta_parent_n": parent.n if parent else 0,
        **_verdict_figures("parent", row.verdict_parent),
        "comparisons": row.verdict_baseline and row.verdict_baseline.planned,
        "parameters": row.parameters,
        "tokens": row.tokens,
        "train_seconds": row.train_seconds,
        "sparsity": row.sparsity,
        "state": row.state,
    }


def _verdict_figures(name: str, verdict: ContrastVerdict | None) -> dict[str, Any]:
    """Return word, 95 % interval, corrected p and p of the own test; no test gives none of these."""
    test = verdict and verdict.test
    low, high = test.interval if test else (None, None)
    return {
        f"{name}_verdict": verdict.word.value if verdict and verdict.is_given else None,
        f"{name}_low": low,
        f"{name}_high": high,
        f"{name}_p": verdict and verdict.p_of_word,
        f"{name}_p_own": verdict and verdict.p_own,
    }


def _verdict(verdict: ContrastVerdict) -> dict[str, Any]:
    return {
        **verdict.to_json(),
        "name": verdict.contrast.name,
        "p_of_word": verdict.p_of_word,
        "rounding_only": verdict.is_rounding,
    }


def _drift(test: DriftTest) -> dict[str, Any]:
    return asdict(test) | {"alarms": test.alarms}


def _noise(study: StudyVerdicts) -> list[dict[str, Any]]:
    """Return the comparisons whose variance hides the others under the rule shared.

    ``factor`` is the ratio of its deviation to the root of the mean variance of the others.
    """
    if study.plan.rule.variance != "shared":
        return []
    deviations = {
        v.contrast.name: v.sd / math.sqrt(v.contrast.scale)
        for v in study.verdicts
        if v.test and v.sd
    }
    noisy = []
    for name, deviation in deviations.items():
        # Squares of ratios, which cannot overflow.
        others = [(sd / deviation) ** 2 for other, sd in deviations.items() if other != name]
        if len(others) >= _MIN_OTHERS and mean_of(others) < 1 / SPREAD_VARIANCES:
            noisy.append({"comparison": name, "factor": 1 / math.sqrt(mean_of(others))})
    return noisy


def _divergence_limit(study: StudyVerdicts) -> dict[str, Any] | None:
    """Return the largest rate of divergences that n seeds without one leave open, at 95 %.

    The rate is 1 - 0.05^(1/n). None if a seed diverged or nothing was tested.
    """
    tested = [verdict for verdict in study.verdicts if verdict.test]
    if not tested or any(v.word is VerdictWord.DIVERGED for v in study.verdicts):
        return None
    n = min(verdict.n for verdict in tested)
    return {"n": n, "rate": 1 - INTERVAL_ERROR ** (1 / n)}


def _runs(table: ResultTable) -> list[dict[str, Any]]:
    items = [(part.labels, item) for part in table.parts for item in part.items]
    items.sort(key=lambda pair: (pair[1].run.variant.number or 0, pair[1].run.label))
    return [_run(item, labels) for labels, item in items]


def _run(item: RunResult | MissingResult, labels: Mapping[str, str]) -> dict[str, Any]:
    run = item.run
    document = {
        "label": run.label,
        "folder": run.path.name,
        "variant": run.variant.slug,
        "labels": dict(labels),
        "seed": run.seed,
        "configuration": run.config.hash8,
        "state": item.state if isinstance(item, MissingResult) else "done",
        "reason": item.reason if isinstance(item, MissingResult) else "",
        "diverged": item.outcome.diverged,
        "unstable": item.outcome.unstable,
        "val_loss": None,
    }
    if isinstance(item, MissingResult):
        return document
    origin = item.origin
    return document | {
        "val_loss": item.loss,
        "run_id": origin.run_id,
        "commit": origin.commit,
        "edited": origin.edited,
        "data": origin.data,
        "weights": origin.weights,
        "torch": origin.torch,
        "device": origin.device,
    }


def _conditions(row: RowRuns) -> dict[str, Any]:
    """Return the distinct values, over the seeds of a row, of what must not differ in silence."""
    facts = [result.facts for result in row.results]
    values = {
        name: list(dict.fromkeys(str(each.observed.get(field, UNKNOWN)) for each in facts))
        for name, field in _CONDITIONS.items()
    }
    sources = {id(each.sources): each.sources for each in facts}.values()
    code = dict.fromkeys(code_digest(each, each)[:_DIGEST_CHARS] for each in sources)
    return {
        "name": row.row.name,
        **values,
        "code": list(code),
        "seeds": sorted(result.run.seed for result in row.results),
    }


def study_series(table: ResultTable) -> list[dict[str, Any]]:
    """Return the curves of each row over its seeds, and its sample: what only figures show.

    A band has ``at`` (tokens; iterations of ``statistics``), ``mean``, ``low`` and ``high``, or is
    null. ``documents`` are the name of each evaluation document and its difference to
    the baseline, in the order of per_query.csv: names may be equal.
    """
    rows = runs_of_rows(table)
    columns = zip(
        rows,
        training_curves(rows),
        evaluation_curves(rows),
        training_differences(rows),
        evaluation_differences(rows),
        strict=True,
    )
    return [
        {
            "name": row.row.name,
            "training": _band(training),
            "evaluation": _band(evaluation),
            "training_difference": _band(training_gap),
            "evaluation_difference": _band(evaluation_gap),
            "statistics": {name: _band(band) for name, band in statistics_curves(row).items()},
            "final_statistics": final_statistics(row),
            "documents": [list(document) for document in document_differences(row)],
            "spikes": [list(point) for r in row.results for point in r.curves.spikes],
            "sample": _sample(row.results),
        }
        for row, training, evaluation, training_gap, evaluation_gap in columns
    ]


def _band(band: SeedBand | None) -> dict[str, list[float]] | None:
    return None if band is None else {name: list(v) for name, v in vars(band).items()}


def _sample(results: Sequence[RunResult]) -> dict[str, Any] | None:
    """Return the text sample of the first seed; None if the run wrote none."""
    if not results:
        return None
    try:
        text = results[0].facts.record.sample
    except MissingRecord:
        return None
    except RecordError as error:
        text = f"({error.problems[0].what})"
    return {"seed": results[0].run.seed, "text": text}
