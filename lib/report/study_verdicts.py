"""Verdicts on the runs of a study: a function of its runs, its rule and its declarations."""

import math
import statistics
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

from lib.report.contrasts import REPEAT_ROLE, DesignEffects
from lib.report.declarations import Look, LookSchedule, declaration_record
from lib.report.replay import Replay, StudyPart, VerdictPlan
from lib.report.significance import TimedValue, drift_test

VERDICTS_FILE = "verdicts.json"
# Remark on every verdict of a study with an A/A step that differs.
AA_FAILED = "A/A step failed"


@dataclass(frozen=True)
class StudyVerdicts:
    """The verdicts on one study."""

    plan: VerdictPlan
    verdicts: Sequence[Mapping[str, Any]]
    # Each A/A step against its parent.
    aa_steps: Sequence[Mapping[str, Any]]
    # The planned looks, and those that were taken; None if the study was judged without looks.
    schedule: LookSchedule | None
    # Of each look, the comparisons that need no further seeds after it.
    closed: Sequence[frozenset[str]]
    # Comparisons of the last look whose runs have not ended.
    waiting: frozenset[str]
    # Whether a seed of a baseline diverged, which ends the study.
    baseline_diverged: bool
    # What the declarations do not explain.
    notes: Sequence[str]
    # The fields of the study's document that do not follow from the shown comparisons alone.
    document: Mapping[str, Any]

    @property
    def looks(self) -> Sequence[Look]:
        """Return the looks that were taken, the oldest first."""
        return self.schedule.taken if self.schedule else ()

    def of_arms(self, arms: Set[str]) -> "StudyVerdicts":
        """Return the verdicts on comparisons of these arms only."""
        verdicts = [v for v in self.verdicts if v["weights"].keys() <= arms]
        aa_steps = [v for v in self.aa_steps if v["weights"].keys() <= arms]
        return replace(self, verdicts=verdicts, aa_steps=aa_steps)


def judge_study(
    parts: Sequence[StudyPart],
    plan: VerdictPlan,
    control_parts: Sequence[StudyPart] = (),
    effects: DesignEffects | None = None,
    evaluation_set: str = "",
    same_documents: Sequence[str] = (),
) -> StudyVerdicts:
    """Return the verdicts on all parts of a study, such as its arms, as one family.

    A part has a name, "" for the only one, its planned comparisons, and the outcomes by variant;
    ``control_parts`` have the comparisons of A/A steps and repeats, ``effects`` those of a factorial
    design.
    """
    replay = Replay(parts, plan, control_parts)
    verdicts, closed = replay.verdicts()
    aa_steps, aa_failed = replay.aa_steps()
    marks = (*replay.rule_changes(), *([AA_FAILED] if aa_failed else []))
    verdicts = [{**v, "remarks": [*v["remarks"], *marks]} for v in verdicts]
    schedule, looks = replay.schedule, zip(replay.looks, closed, strict=True)
    document = {
        "metric": "val_loss",
        "rule": plan.rule_record,
        "is_declared_first": replay.is_declared_first,
        "look_plan": schedule and asdict(schedule.plan),
        "looks": [_look_record(look, names) for look, names in looks],
        "alpha_spent": schedule and schedule.spent * plan.rule.alpha,
        "family": sorted(replay.family),
        "planned_comparisons": replay.planned,
        "pairing_gain": pairing_gain(verdicts),
        "not_estimable": effects and effects.not_estimable,
        "inflated_variances": effects and effects.inflated,
        "aa_failed": aa_failed,
        "evaluation_set": evaluation_set or None,
        "same_documents": same_documents,
        "repeats": _repeats(control_parts),
        **_drifts(parts),
    }
    return StudyVerdicts(
        plan,
        verdicts,
        aa_steps,
        schedule,
        closed,
        replay.waiting(),
        replay.baseline_diverged,
        replay.notes(),
        document,
    )


def _look_record(look: Look, closed: frozenset[str]) -> dict[str, Any]:
    record = declaration_record(look) | {"closed": sorted(closed), "family": sorted(look.family)}
    del record["kind"], record["at"]
    return record


def _repeats(parts: Sequence[StudyPart]) -> dict[str, dict[int, float]]:
    """Return the differences of each repeat to the first training of its seeds."""
    repeats: dict[str, dict[int, float]] = {}
    for part, contrasts, outcomes in parts:
        for contrast in contrasts:
            if contrast.role == REPEAT_ROLE:
                again, first = (
                    {run.seed: run.loss for run in outcomes.get(arm, ())}
                    for arm in (contrast.step, contrast.reference)
                )
                repeats[f"{part}{contrast.step}"] = {
                    seed: loss - before
                    for seed, loss in sorted(again.items())
                    if loss is not None and (before := first.get(seed)) is not None
                }
    return repeats


def _drifts(parts: Sequence[StudyPart]) -> dict[str, Any]:
    """Return the drift of the losses, and that of the speed of each device that can be tested.

    The speed is tested as its logarithm: steps differ in speed by a factor, so their logarithms
    differ by a mean.
    """
    losses: list[TimedValue] = []
    speeds: dict[str, list[TimedValue]] = {}
    for part, _, outcomes in parts:
        for arm, run in ((arm, run) for arm, runs in outcomes.items() for run in runs):
            if run.started_at is None:
                continue
            if run.loss is not None and not run.diverged:
                losses.append(TimedValue(f"{part}{arm}", run.seed, run.started_at, run.loss))
            if run.speed:
                value = TimedValue(f"{part}{arm}", run.seed, run.started_at, math.log(run.speed))
                speeds.setdefault(run.device, []).append(value)
    tests = {device: drift_test(values) for device, values in sorted(speeds.items())}
    return {
        "drift": drift_test(losses),
        "speed_drifts": {device: test for device, test in tests.items() if test is not None},
    }


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
