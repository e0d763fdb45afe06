"""Verdicts on the runs of a study: outcomes from run directories, the planned family, its record.

The record ``verdicts.json`` lies beside the runs. Its family never shrinks: comparisons made earlier
in the folder still count. If the rule is changed after results exist, the former words stay in the
record, and every verdict is marked.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem
from lib.files import canonical_json, write_atomic
from lib.json_files import RecordError, read_json_object
from lib.plan.run import RunVariant
from lib.report.contrast_tests import VerdictRule
from lib.report.drift import DriftTest, TimedLoss, drift_test
from lib.report.render import json_document
from lib.report.verdicts import (
    Contrast,
    ContrastVerdict,
    SeedOutcome,
    judge,
    pairing_gain,
    plan_contrasts,
)
from lib.runs.record import EvalRow, RunRecord, TrainRow
from lib.runs.run_dir import RunDir

VERDICTS_FILE = "verdicts.json"
SCHEMA_VERSION = 1
_METRIC = "val_loss"
_NON_FINITE = re.compile(r"\b(nan|inf|infinite|non-?finite|not finite|diverged)\b", re.IGNORECASE)
# A final loss this close to that of the untrained model has learned nothing, in nats.
_UNTRAINED_NATS = 0.1
# A run that ends above its loss at this share of its iterations has diverged.
_EARLY_SHARE = 0.2


@dataclass(frozen=True)
class VerdictPlan:
    """What is decided before the first run: the rule, the comparisons, and what was judged before."""

    rule: VerdictRule = field(default_factory=VerdictRule)
    # both, baseline or parent
    against: str = "both"
    # Names of all comparisons made in this folder so far.
    family: frozenset[str] = frozenset()
    # Former rules with their words, the oldest first.
    former: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class StudyVerdicts:
    """The verdicts on one study."""

    plan: VerdictPlan
    verdicts: Sequence[ContrastVerdict]
    planned: int
    # Share of the variance that pairing by seed removed; None without a test.
    pairing: float | None
    # Whether losses follow the time; None if the order of the runs cannot tell.
    drift: DriftTest | None = None


def finished_outcome(seed: int, record: RunRecord) -> SeedOutcome:
    """Return the outcome of a finished run: its loss, or that it diverged."""
    final = record.summary.final
    items = canonical_json([document.nll_sum for document in record.documents])
    digest = hashlib.sha256(items.encode()).hexdigest()[:16]
    outcome = SeedOutcome(seed, final.val_loss, items=digest, started_at=_started_at(record))
    first = next((row.loss for row in record.metrics if isinstance(row, TrainRow)), None)
    # Pretrained weights begin below the unigram entropy: they may improve by less.
    untrained = first is not None and first > final.unigram_entropy
    if first is not None and untrained and final.val_loss >= first - _UNTRAINED_NATS:
        reason = f"diverged: final loss {final.val_loss:.4f}, first loss {first:.4f}"
        return replace(outcome, diverged=True, reason=reason)
    evaluations = [row for row in record.metrics if isinstance(row, EvalRow)]
    early = [row for row in evaluations if row.iteration >= _EARLY_SHARE * final.iterations]
    if early and early[0].iteration < final.iterations and final.val_loss > early[0].val_loss:
        reason = (
            f"diverged: final loss {final.val_loss:.4f}, loss {early[0].val_loss:.4f} at iteration "
            f"{early[0].iteration}"
        )
        return replace(outcome, diverged=True, reason=reason)
    return outcome


def _started_at(record: RunRecord) -> float | None:
    """Return when the runner first submitted the run, or else when the run first started."""
    first = next(iter(record.manifest.attempts), None)
    if first is None:
        return None
    return first.started_at if first.submitted_at is None else first.submitted_at


def missing_outcome(
    seed: int, run: RunDir, reason: str, message: str, undeclared: Sequence[str] = ()
) -> SeedOutcome:
    """Return the outcome of a run without a result: diverged, not comparable, or missing."""
    diverged = run.numerics_failure.exists() or bool(_NON_FINITE.search(message))
    failed = reason.startswith("failed")
    return SeedOutcome(seed, None, failed and diverged, reason, undeclared=tuple(undeclared))


def contrasts_of(variants: Sequence[RunVariant], against: str) -> list[Contrast]:
    """Return the planned comparisons of ``variants``; a parent outside the plan is left out."""
    names = [variant.slug for variant in variants]
    baseline = next((v.slug for v in variants if not v.parent), "")
    parents = {v.slug: v.parent if v.parent in names else "" for v in variants}
    if not baseline:
        return [Contrast.pair(step, parent, "parent") for step, parent in parents.items() if parent]
    return plan_contrasts({baseline: "", **parents}, against)


def judge_study(
    parts: Sequence[tuple[str, Sequence[Contrast], Mapping[str, Sequence[SeedOutcome]]]],
    plan: VerdictPlan,
) -> StudyVerdicts:
    """Return the verdicts on all parts of a study, such as its arms, as one family.

    A part has a name, "" for the only one, its planned comparisons, and the outcomes by variant.
    """
    family = plan.family | {
        _in_part(part, c).name for part, contrasts, _ in parts for c in contrasts
    }
    plan = replace(plan, family=family)
    verdicts = []
    for part, contrasts, outcomes in parts:
        for verdict in judge(contrasts, outcomes, plan.rule, len(family)):
            named = _in_part(part, verdict.contrast)
            values = {f"{part}{arm}": losses for arm, losses in verdict.values.items()}
            remarks = (*verdict.remarks, *_changes(plan))
            verdicts.append(replace(verdict, contrast=named, values=values, remarks=remarks))
    return StudyVerdicts(plan, verdicts, len(family), pairing_gain(verdicts), _drift(parts))


def _drift(
    parts: Sequence[tuple[str, Sequence[Contrast], Mapping[str, Sequence[SeedOutcome]]]],
) -> DriftTest | None:
    runs = [
        TimedLoss(f"{part}{arm}", run.seed, run.started_at, run.loss)
        for part, _, outcomes in parts
        for arm, runs in outcomes.items()
        for run in runs
        if run.loss is not None and run.started_at is not None and not run.diverged
    ]
    return drift_test(runs)


def _changes(plan: VerdictPlan) -> list[str]:
    """Return the remark on settings that differ from the first recorded rule."""
    if not plan.former:
        return []
    first, now = plan.former[0]["rule"], _rule(plan)
    changed = [name for name in now if first.get(name) != now[name]]
    return [f"rule changed after results: {', '.join(changed) or 'now as before'}"]


def _rule(plan: VerdictPlan) -> dict[str, Any]:
    return {**asdict(plan.rule), "against": plan.against}


def _in_part(part: str, contrast: Contrast) -> Contrast:
    """Return the contrast with the name of its part before the names of its arms."""
    weights = {f"{part}{arm}": weight for arm, weight in contrast.weights.items()}
    reference = contrast.reference and f"{part}{contrast.reference}"
    return Contrast(f"{part}{contrast.step}", reference, contrast.role, weights)


def _name(step: str, reference: str) -> str:
    return Contrast(step, reference, "", {}).name


def with_record(plan: VerdictPlan, folder: Path) -> VerdictPlan:
    """Return ``plan`` with the family and the former rules recorded in ``folder``.

    Raises ConfigError if the record cannot be read.
    """
    file = folder / VERDICTS_FILE
    if not file.exists():
        return plan
    try:
        record = read_json_object(file)
        former = tuple(record["former"])
        words = {_name(v["step"], v["reference"]): v["verdict"] for v in record["verdicts"]}
        judged = any(verdict["n"] for verdict in record["verdicts"])
        family, rule = frozenset(record["family"]), record["rule"]
    except (RecordError, KeyError, TypeError) as error:
        what = f"damaged record of verdicts: {error!r}"
        advice = "move it aside: earlier comparisons then no longer count"
        raise ConfigError(Problem(what, str(file), advice, code="run.damaged")) from None
    if rule != _rule(plan) and judged:
        former = (*former, {"rule": rule, "verdicts": words})
    return replace(plan, family=plan.family | family, former=former)


def write_verdicts(study: StudyVerdicts, folder: Path) -> Path:
    """Write the record of the verdicts into ``folder`` and return its path."""
    path = folder / VERDICTS_FILE
    write_atomic(path, verdicts_to_json(study))
    return path


def verdicts_to_json(study: StudyVerdicts) -> str:
    """Return the verdicts as one JSON document with sorted keys."""
    return json_document(SCHEMA_VERSION, verdicts_record(study))


def verdicts_record(study: StudyVerdicts) -> dict[str, Any]:
    """Return the record of the verdicts as plain JSON types."""
    return {
        "metric": _METRIC,
        "rule": _rule(study.plan),
        "former": list(study.plan.former),
        "family": sorted(study.plan.family),
        "planned_comparisons": study.planned,
        "pairing_gain": study.pairing,
        "drift": asdict(study.drift) if study.drift else None,
        "verdicts": [verdict.to_json() for verdict in study.verdicts],
    }
