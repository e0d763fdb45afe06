"""The record ``verdicts.json`` beside the runs of a study: rule, family, looks and verdicts."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, Problem
from lib.files import write_atomic
from lib.json_files import RecordError, read_json_object
from lib.report.contrast_tests import ContrastTest, VerdictRule
from lib.report.contrasts import Contrast
from lib.report.looks import Look, LookSchedule
from lib.report.options import LookPlan, sum_of_shares
from lib.report.render import json_document
from lib.report.study_verdicts import UNKNOWN_SET, StudyVerdicts, VerdictPlan
from lib.report.verdicts import ContrastVerdict, VerdictWord

VERDICTS_FILE = "verdicts.json"
SCHEMA_VERSION = 3
_METRIC = "val_loss"


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
        family, rule = frozenset(record["family"]), dict(record["rule"])
        schedule = plan.schedule
        others: tuple[Mapping[str, Any], ...] = ()
        # Version 1 listed no looks.
        if schedule is not None and record["schema_version"] > 1:
            schedule, others = _schedules(plan, schedule.plan, record)
    except (RecordError, KeyError, TypeError, ValueError) as error:
        what = f"damaged record of verdicts: {error!r}"
        advice = "move it aside: earlier comparisons then no longer count"
        raise ConfigError(Problem(what, str(file), advice, code="run.damaged")) from None
    if not rule.get("simple_effects", True):
        # Earlier records of factorial designs declare that they have none, as all have now.
        del rule["simple_effects"]
    if rule != plan.rule_record and judged:
        former = (*former, {"rule": rule, "verdicts": words})
        schedule = schedule and schedule.judged_again()
    return replace(
        plan,
        family=plan.family | family,
        former=former,
        schedule=schedule,
        other_looks=others,
        aa_failed=bool(record.get("aa_failed")),
        recorded={_name(v["step"], v["reference"]): v for v in record["verdicts"]},
    )


def with_other_studies(plan: VerdictPlan, folder: Path) -> VerdictPlan:
    """Return ``plan`` with the evaluation sets that the records beside ``folder`` name.

    A record that cannot be read may be of a study on any set.
    """
    others = {}
    for file in sorted(folder.parent.glob(f"*/{VERDICTS_FILE}")):
        if file.parent.name != folder.name:
            try:
                evaluation_set = read_json_object(file).get("evaluation_set")
            except RecordError:
                evaluation_set = UNKNOWN_SET
            others[file.parent.name] = str(evaluation_set)
    return replace(plan, other_studies=others)


def _schedules(
    plan: VerdictPlan, looks: LookPlan, record: Mapping[str, Any]
) -> tuple[LookSchedule, tuple[Mapping[str, Any], ...]]:
    """Return the looks at this study, and the records of those at other studies in the folder.

    Studies that have no run in common are separate. Raises KeyError, TypeError or ValueError if the
    record is damaged.
    """
    if record["schema_version"] == 2:
        # Its looks do not list their families.
        family = {name: sorted(c.weights) for name, c in plan.contrasts.items()}
        taken = [{**look, "family": family, "added": False} for look in record["looks"]]
        record = {**record, "looks": taken, "other_looks": []}
    records = [record, *record["other_looks"]]
    schedules = [_schedule_from_json(each, plan.rule, looks) for each in records]
    here = next((i for i, s in enumerate(schedules) if s.concerns(plan.contrasts)), None)
    if not plan.declared:
        here = 0
    others = tuple(
        {"looks": each["looks"], "look_plan": each["look_plan"]}
        for i, each in enumerate(records)
        if i != here and each["looks"]
    )
    return LookSchedule(looks) if here is None else schedules[here], others


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
    shown = {verdict.contrast.name for verdict in study.verdicts}
    others = [verdict for name, verdict in study.plan.recorded.items() if name not in shown]
    return {
        "metric": _METRIC,
        **_looks_record(study.plan),
        "rule": study.plan.rule_record,
        "former": list(study.plan.former),
        "family": sorted(study.plan.family),
        "planned_comparisons": study.planned,
        "pairing_gain": study.pairing,
        "not_estimable": dict(study.effects.not_estimable) if study.effects else None,
        "inflated_variances": dict(study.effects.inflated) if study.effects else None,
        "aa_steps": [verdict.to_json() for verdict in study.aa_steps],
        "aa_failed": study.aa_failed,
        "evaluation_set": study.evaluation_set or None,
        "repeats": {name: dict(seeds) for name, seeds in study.repeats.items()},
        "drift": asdict(study.drift) if study.drift else None,
        "verdicts": [*(verdict.to_json() for verdict in study.verdicts), *others],
    }


def _looks_record(plan: VerdictPlan) -> dict[str, Any]:
    if plan.schedule is None:
        return {"looks": [], "look_plan": None, "alpha_spent": None, "other_looks": []}
    return {
        "other_looks": list(plan.other_looks),
        "looks": [look.to_json() for look in plan.schedule.taken],
        "look_plan": asdict(plan.schedule.plan),
        "alpha_spent": plan.schedule.spent(plan.rule.alpha),
    }


# Reading the looks.


def _name(step: str, reference: str) -> str:
    return Contrast(step, reference, "", {}).name


def _schedule_from_json(
    record: Mapping[str, Any], rule: VerdictRule, plan: LookPlan
) -> LookSchedule:
    """Return the schedule of a record of verdicts; ``plan`` applies before the first look.

    Raises KeyError, TypeError or ValueError if the record is damaged.
    """
    taken = tuple(_look_from_json(look, rule) for look in record["looks"])
    if not taken:
        return LookSchedule(plan)
    planned = record["look_plan"]
    plan = LookPlan(tuple(map(int, planned["seeds"])), tuple(map(float, planned["shares"])))
    ascend = (a.n + (not b.is_at_added) <= b.n for a, b in itertools.pairwise(taken))
    if plan.problems or not all(ascend):
        raise ValueError("looks that are not planned, or not ascending")
    if sum_of_shares([look.share for look in taken]) > 1 or min(look.share for look in taken) <= 0:
        raise ValueError("looks that spend more than alpha")
    return LookSchedule(plan, taken)


def _verdict_from_json(record: Mapping[str, Any], rule: VerdictRule) -> ContrastVerdict:
    """Return the verdict that ``ContrastVerdict.to_json`` recorded."""
    weights = {arm: float(weight) for arm, weight in record["weights"].items()}
    word = record["verdict"] or VerdictWord.INCONCLUSIVE
    return ContrastVerdict(
        contrast=Contrast(record["step"], record["reference"], record["role"], weights),
        word=VerdictWord(word),
        planned=int(record["planned_comparisons"]),
        rule=rule,
        reason=record["reason"] or "",
        remarks=tuple(record["remarks"]),
        seeds=tuple(map(int, record["seeds"])),
        values={arm: tuple(map(float, losses)) for arm, losses in record["values"].items()},
        differences=tuple(map(float, record["differences"])),
        difference=float(record["difference"]),
        sd=float(record["sd"]),
        document_error=_number(record.get("document_error")),
        test=None if record["interval_95"] is None else _test_from_json(record),
        p_own=_number(record["p_own"]),
        p_sign_flip=_number(record["p_sign_flip"]),
        p_smallest=_number(record["p_smallest_sign_flip"]),
        more_seeds=record["more_seeds"],
        other=record["other_rule"] or {},
        excluded=tuple(record["excluded"]),
        look=record["look"],
        share=float(record["share"]),
        interval_of_look=_pair(record["interval_of_look"]),
    )


def _test_from_json(record: Mapping[str, Any]) -> ContrastTest:
    interval = _pair(record["interval_95"])
    assert interval is not None
    return ContrastTest(
        sd=float(record["sd_of_rule"]),
        degrees=float(record["degrees_of_freedom"]),
        interval=interval,
        p=float(record["p"]),
        p_adjusted=float(record["p_adjusted"]),
        p_equivalent=_number(record["p_equivalent"]),
        p_equivalent_adjusted=_number(record["p_equivalent_adjusted"]),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _pair(values: Any) -> tuple[float, float] | None:
    return None if values is None else (float(values[0]), float(values[1]))


def _look_from_json(record: Mapping[str, Any], rule: VerdictRule) -> Look:
    """Return the look of a record; its verdicts were given under ``rule``."""
    verdicts = dict(record["verdicts"]).items()
    return Look(
        number=int(record["look"]),
        n=int(record["n"]),
        share=float(record["share"]),
        planned=bool(record["planned"]),
        seeds=tuple(map(int, record["seeds"])),
        is_at_added=bool(record["added"]),
        closed=frozenset(record["closed"]),
        family={name: frozenset(arms) for name, arms in dict(record["family"]).items()},
        verdicts={name: _verdict_from_json(verdict, rule) for name, verdict in verdicts},
    )
