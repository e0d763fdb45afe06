"""Verdicts on the runs of a study: outcomes from run directories, the planned family, its record.

The record ``verdicts.json`` lies beside the runs. Its family never shrinks: comparisons made earlier
in the folder still count. If the rule is changed after results exist, the former words stay in the
record, and every verdict is marked.

Words are given at looks only (lib/report/looks.py), which the record lists: a look needs complete
blocks, that is seeds of which every run of an undecided comparison has ended.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lib.report.contrast_tests import WHOLE_ALPHA, ErrorLevel, VerdictRule
from lib.report.contrasts import (
    AA_ROLE,
    EFFECT,
    REPEAT_ROLE,
    Contrast,
    DesignEffects,
)
from lib.report.looks import LASTING_WORDS, Look, LookSchedule
from lib.report.options import NATS
from lib.report.significance import DriftTest, TimedValue, drift_test
from lib.report.verdicts import ContrastVerdict, SeedOutcome, VerdictWord, judge

# Remark on every verdict of a study with an A/A step that differs.
AA_FAILED = "A/A step failed"
# Evaluation set of a study whose record cannot be read.
UNKNOWN_SET = "unknown"

# Name of a part, its planned comparisons, and the outcomes of its runs by variant.
StudyPart = tuple[str, Sequence[Contrast], Mapping[str, Sequence[SeedOutcome]]]


@dataclass(frozen=True)
class VerdictPlan:
    """Declarations before the first run (rule, comparisons), and the earlier judgements."""

    rule: VerdictRule = field(default_factory=VerdictRule)
    # both, baseline or parent
    against: str = "both"
    # Of a factorial design, whose effects are compared instead of its runs: whether the two-way
    # interactions are, too. None for another design.
    interactions: bool | None = None
    # Names of all comparisons made in this folder so far.
    family: frozenset[str] = frozenset()
    # Former rules with their words, the oldest first.
    former: tuple[Mapping[str, Any], ...] = ()
    # Looks at the study; None judges once, without looks.
    schedule: LookSchedule | None = None
    # Comparisons of the configured study, by arm: their runs belong to every block.
    declared: Mapping[str, Sequence[Contrast]] = field(default_factory=dict)
    # Verdicts of the record by name: verdicts that a report does not show remain in the record.
    recorded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # True if rows are split by labels, or nothing is written: no look is taken.
    exploratory: bool = False
    # Whether the record has an A/A step that differs.
    aa_failed: bool = False
    # Looks of the record at other studies in the folder, such as another sweep.
    other_looks: tuple[Mapping[str, Any], ...] = ()
    # Other studies with verdicts → digest of their evaluation documents.
    other_studies: Mapping[str, str] = field(default_factory=dict)
    # Whether verdicts are given; a study of speed has none.
    judged: bool = True
    # Of losses and differences.
    unit: str = NATS

    @property
    def rule_record(self) -> dict[str, Any]:
        """Return the declared rule as plain JSON types."""
        rule = {**asdict(self.rule), "against": self.against}
        if self.interactions is not None:
            rule |= {"interactions": self.interactions}
        if self.unit != NATS:
            rule |= {"unit": self.unit}
        return rule

    @property
    def contrasts(self) -> dict[str, Contrast]:
        """Return the declared comparisons by name, with the names of their parts."""
        return _named_contrasts(self.declared.items())


@dataclass(frozen=True)
class StudyVerdicts:
    """The verdicts on one study."""

    plan: VerdictPlan
    verdicts: Sequence[ContrastVerdict]
    planned: int
    # Share of the variance that pairing by seed removed; None without a test.
    pairing: float | None
    # Effects of a factorial design, else None.
    effects: DesignEffects | None = None
    # Drift of the losses over time; None if the order of the runs does not allow the test.
    drift: DriftTest | None = None
    # Device → whether the speed follows the time. Not part of the record, which has no clock.
    speed_drifts: Mapping[str, DriftTest] = field(default_factory=dict)
    # The look that these verdicts took; None if none was due.
    taken: Look | None = None
    # Whether a seed of a baseline diverged, which ends the study.
    baseline_diverged: bool = False
    # Repeat → seed → its loss minus that of the first training, in nats per token.
    repeats: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    # Each A/A step against its parent.
    aa_steps: Sequence[ContrastVerdict] = ()
    # Digest of the evaluation documents; "" if unknown or not the same for all runs.
    evaluation_set: str = ""

    @property
    def on_same_documents(self) -> list[str]:
        """Return the other studies with verdicts on the same evaluation documents."""
        if not self.evaluation_set:
            return []
        marks = {self.evaluation_set: "", UNKNOWN_SET: " (unreadable record)"}
        others = sorted(self.plan.other_studies.items())
        return [f"{name}{marks[other]}" for name, other in others if other in marks]

    @property
    def aa_failed(self) -> bool:
        """Return whether an A/A step differs from its parent, now or at an earlier look."""
        return self.plan.aa_failed or any(map(is_failed, self.aa_steps))

    @property
    def new_words(self) -> list[ContrastVerdict]:
        """Return the verdicts with a word that the look of this study gave."""
        words = self.taken.words if self.taken else {}
        return [v for v in self.verdicts if v.contrast.name in words]


def judge_study(
    parts: Sequence[StudyPart],
    plan: VerdictPlan,
    control_parts: Sequence[StudyPart] = (),
    effects: DesignEffects | None = None,
) -> StudyVerdicts:
    """Return the verdicts on all parts of a study, such as its arms, as one family.

    A part has a name, "" for the only one, its planned comparisons, and the outcomes by variant;
    ``control_parts`` have the comparisons of A/A steps and repeats, ``effects`` those of a factorial design.
    """
    compared = plan.contrasts | _named_contrasts((part, each) for part, each, _ in parts)
    if not plan.exploratory:
        plan = replace(plan, family=plan.family | compared.keys())
    planned = max(len(plan.family), sum(len(contrasts) for _, contrasts, _ in parts))
    seeds = complete_blocks(parts, plan, control_parts)
    added = frozenset[str]()
    if plan.schedule and not plan.exploratory:
        added = plan.schedule.added(compared)
    look = _look(plan, seeds, compared, added)
    level, family = _level(plan.schedule, look), planned
    if level and look and look.is_at_added:
        # The comparisons judged at earlier looks are not in the family of this one. A run that
        # arrives after the look is judged among all.
        family, level = len(added) or planned, replace(level, differing=0, equivalent=0)
    verdicts = []
    for part, contrasts, outcomes in parts:
        standing = _standing_verdicts(plan, seeds, part, contrasts, added)
        for verdict in _judged(contrasts, outcomes, plan.rule, family, level, standing):
            if verdict.contrast.ends not in standing:
                verdict = _marked(verdict, plan, look)
            verdicts.append(_named(verdict, part))
    diverged = any(_baseline_diverged(contrasts, outcomes) for _, contrasts, outcomes in parts)
    gain = pairing_gain(verdicts)
    drift = _drift(parts)
    study = StudyVerdicts(plan, verdicts, planned, gain, effects, drift, baseline_diverged=diverged)
    study = _with_look(study, look)
    study = replace(
        study,
        aa_steps=_aa_steps(control_parts, plan, level),
        repeats=_repeats(control_parts),
        speed_drifts=_speed_drifts(parts),
    )
    marks = (*_changes(plan), *([AA_FAILED] if study.aa_failed else []))
    return replace(
        study, verdicts=[replace(v, remarks=(*v.remarks, *marks)) for v in study.verdicts]
    )


def _judged(
    contrasts: Sequence[Contrast],
    outcomes: Mapping[str, Sequence[SeedOutcome]],
    rule: VerdictRule,
    planned: int,
    level: ErrorLevel | None,
    standing: Mapping[tuple[str, str], ContrastVerdict],
) -> list[ContrastVerdict]:
    """Return the verdicts on one part: without effects of a design, the factorial rule is shared."""
    if rule.variance == "factorial" and not any(c.role == EFFECT for c in contrasts):
        rule = replace(rule, variance="shared")
    return judge(contrasts, outcomes, rule, planned, level, standing)


def _aa_steps(
    parts: Sequence[StudyPart], plan: VerdictPlan, level: ErrorLevel | None
) -> list[ContrastVerdict]:
    return [
        _named(verdict, part)
        for part, contrasts, outcomes in parts
        for verdict in judge_aa_steps(
            [c for c in contrasts if c.role == AA_ROLE], outcomes, plan.rule, level
        )
    ]


def _repeats(parts: Sequence[StudyPart]) -> dict[str, dict[int, float]]:
    """Return the differences of each repeat to the first training of its seeds."""
    repeats: dict[str, dict[int, float]] = {}
    for part, contrasts, outcomes in parts:
        for contrast in contrasts:
            if contrast.role == REPEAT_ROLE:
                again, first = (
                    {run.seed: run.loss for run in outcomes.get(arm, ())} for arm in contrast.ends
                )
                repeats[f"{part}{contrast.step}"] = {
                    seed: loss - before
                    for seed, loss in sorted(again.items())
                    if loss is not None and (before := first.get(seed)) is not None
                }
    return repeats


def _drift(parts: Sequence[StudyPart]) -> DriftTest | None:
    return drift_test(
        [
            TimedValue(name, run.seed, run.started_at, run.loss)
            for name, run in _named_runs(parts)
            if run.loss is not None and run.started_at is not None and not run.diverged
        ]
    )


def _speed_drifts(parts: Sequence[StudyPart]) -> dict[str, DriftTest]:
    """Return the drift of the logarithm of the speed of each device that can be tested.

    Steps differ in speed by a factor, so their logarithms differ by a mean.
    """
    by_device: dict[str, list[TimedValue]] = {}
    for name, run in _named_runs(parts):
        if run.speed and run.started_at is not None:
            value = TimedValue(name, run.seed, run.started_at, math.log(run.speed))
            by_device.setdefault(run.device, []).append(value)
    tests = {device: drift_test(values) for device, values in sorted(by_device.items())}
    return {device: test for device, test in tests.items() if test is not None}


def _named_runs(parts: Sequence[StudyPart]) -> Iterator[tuple[str, SeedOutcome]]:
    for part, _, outcomes in parts:
        for arm, runs in outcomes.items():
            for run in runs:
                yield f"{part}{arm}", run


# A/A steps.
#
# Such a step is the baseline with other initial weights: a step without an effect by construction. It
# is outside the family of comparisons and outside their mean variance: a paired t-test of its own
# variance tests it alone, at the alpha of the look. A difference shows that the study claims
# differences where none exist, and marks every verdict.


def judge_aa_steps(
    contrasts: Sequence[Contrast],
    outcomes: Mapping[str, Sequence[SeedOutcome]],
    rule: VerdictRule,
    level: ErrorLevel | None,
) -> list[ContrastVerdict]:
    """Return the verdict on each comparison, tested alone; ``level`` is that of the look."""
    alone = replace(rule, variance="own")
    share = level and ErrorLevel(level.share)
    return [judge([contrast], outcomes, alone, 1, share)[0] for contrast in contrasts]


def is_failed(verdict: ContrastVerdict) -> bool:
    """Return whether the A/A step differs from its parent."""
    return verdict.word in (VerdictWord.BETTER, VerdictWord.WORSE)


def aa_word(verdict: ContrastVerdict) -> str:
    """Return the result of an A/A step as text."""
    if is_failed(verdict):
        return AA_FAILED
    unknown = verdict.word in (VerdictWord.UNFAIR, VerdictWord.DIVERGED)
    return f"A/A step {verdict.word if unknown else 'passed'}"


def pairing_gain(verdicts: Sequence[ContrastVerdict]) -> float | None:
    """Return the share of the variance that pairing by seed removes, over all step contrasts.

    None without a tested contrast of two runs. One contrast has too few seeds for this figure.
    """
    paired, separate = 0.0, 0.0
    for verdict in verdicts:
        if verdict.test is not None and verdict.sd is not None and len(verdict.values) == 2:
            paired += verdict.sd**2
            separate += sum(statistics.stdev(losses) ** 2 for losses in verdict.values.values())
    return 1 - paired / separate if separate else None


# Looks.


def complete_blocks(
    parts: Sequence[StudyPart], plan: VerdictPlan, control_parts: Sequence[StudyPart] = ()
) -> tuple[int, ...]:
    """Return the seeds of which every run of an undecided comparison, and of a control, has ended.

    A word without the A/A step of its seeds could not be marked if that step fails.
    """
    if plan.exploratory:
        return ()
    last = plan.schedule.last if plan.schedule else None
    closed = last.closed if last else frozenset()
    declared = plan.declared or {part: contrasts for part, contrasts, _ in parts}
    required = {
        f"{part}{arm}"
        for part, contrasts in declared.items()
        for contrast in contrasts
        if contrast_name(part, contrast) not in closed
        for arm in contrast.weights
    }
    if not required:
        return last.seeds if last else ()
    required |= {
        f"{part}{arm}"
        for part, contrasts, _ in control_parts
        for contrast in contrasts
        for arm in contrast.weights
    }
    ended: dict[str, set[int]] = {name: set() for name in required}
    for part, _, outcomes in (*parts, *control_parts):
        for arm, runs in outcomes.items():
            ended.setdefault(f"{part}{arm}", set()).update(run.seed for run in runs if run.ended)
    return tuple(sorted(set.intersection(*(ended[name] for name in required))))


def _look(
    plan: VerdictPlan,
    seeds: tuple[int, ...],
    contrasts: Mapping[str, Contrast],
    added: frozenset[str],
) -> Look | None:
    """Return the look at the complete blocks ``seeds``: a new one, the last one again, or none.

    A seed of an earlier look may not be omitted, whatever its outcome.
    """
    if plan.schedule is None or len(seeds) < plan.rule.min_seeds:
        return None
    last = plan.schedule.last
    if last is not None and not set(last.seeds) <= set(seeds):
        return None
    due = plan.schedule.due(len(seeds))
    if last is not None and last.n == len(seeds):
        due = plan.schedule.look_at_added() if added else last
    family = {name: frozenset(contrast.weights) for name, contrast in contrasts.items()}
    return due and replace(due, seeds=seeds, family={**(last.family if last else {}), **family})


def _level(schedule: LookSchedule | None, look: Look | None) -> ErrorLevel | None:
    if schedule is None:
        return WHOLE_ALPHA
    if look is None:
        return None
    words = [verdict.word for verdict in schedule.words.values()]
    equivalent = words.count(VerdictWord.EQUIVALENT)
    after = schedule.with_look(look)
    return ErrorLevel(look.share, len(words) - equivalent, equivalent, after.share_at)


def _standing_verdicts(
    plan: VerdictPlan,
    seeds: Sequence[int],
    part: str,
    contrasts: Sequence[Contrast],
    added: frozenset[str],
) -> dict[tuple[str, str], ContrastVerdict]:
    """Return the verdicts of earlier looks that stay: words, and all if no seed was added since."""
    schedule = plan.schedule
    if schedule is None or schedule.last is None:
        return {}
    standing = schedule.words
    if not set(seeds) > set(schedule.last.seeds):
        standing |= schedule.standing
    verdicts = {}
    for contrast in contrasts:
        name = contrast_name(part, contrast)
        if name in standing and name not in added:
            verdict = standing[name]
            # The runs that were judged: a design may have more of them since.
            weights = verdict.contrast.weights
            arms = {arm: arm.removeprefix(part) for arm in weights}
            then = replace(contrast, weights={arms[arm]: weights[arm] for arm in arms})
            values = {arms[arm]: verdict.values.get(arm, ()) for arm in arms}
            verdicts[contrast.ends] = replace(verdict, contrast=then, values=values)
    return verdicts


def _marked(verdict: ContrastVerdict, plan: VerdictPlan, look: Look | None) -> ContrastVerdict:
    """Return a new verdict with its look, or with the reason why there is none."""
    schedule = plan.schedule
    if schedule is None or verdict.word in (VerdictWord.UNFAIR, VerdictWord.DIVERGED):
        return verdict
    if look is None:
        if verdict.n < plan.rule.min_seeds:
            return verdict
        return replace(verdict, share=0.0, reason=_wait(plan, verdict.n))
    if verdict.n < plan.rule.min_seeds:
        return verdict
    remarks = list(verdict.remarks)
    if not look.planned:
        remarks.append("unplanned look")
    elif verdict.word in LASTING_WORDS and look.n < schedule.plan.seeds[-1]:
        remarks.append("stopped early: the estimate is biased away from 0")
    return replace(verdict, look=look.number, share=look.share, remarks=tuple(remarks))


def _wait(plan: VerdictPlan, seeds: int) -> str:
    """Return the reason of a comparison that has enough ``seeds``, but no look."""
    if plan.exploratory:
        return "a table of selected steps or seeds takes no look"
    assert plan.schedule is not None
    if n := plan.schedule.next_planned():
        if n > seeds:
            return f"next look at {n} seeds"
        return (
            f"the look at {n} seeds waits for the other runs of the study; .config can declare "
            "fewer steps"
        )
    last = plan.schedule.last
    if last is not None and not plan.schedule.share_at(last.n + 1):
        return "no alpha is left for another look"
    return "next look at the next complete seed"


def _with_look(study: StudyVerdicts, look: Look | None) -> StudyVerdicts:
    """Return ``study`` with its look in the schedule, if there is one."""
    schedule = study.plan.schedule
    if schedule is None or look is None:
        return study
    by_name = {v.contrast.name: v for v in study.verdicts}
    judged = {name: v for name, v in by_name.items() if v.look == look.number}
    closed = {name for name, verdict in by_name.items() if _is_closed(verdict)}
    if study.baseline_diverged:
        closed = set(study.plan.family)
    look = replace(
        look,
        closed=frozenset(closed | (look.closed - by_name.keys())),
        verdicts={**judged, **look.verdicts},
    )
    is_new = look.number > len(schedule.taken)
    plan = replace(study.plan, schedule=schedule.with_look(look))
    return replace(study, plan=plan, taken=look if is_new else None)


def _is_closed(verdict: ContrastVerdict) -> bool:
    """Return whether further seeds would not change the word."""
    return verdict.word is not VerdictWord.INCONCLUSIVE or verdict.is_rounding


def _baseline_diverged(
    contrasts: Sequence[Contrast], outcomes: Mapping[str, Sequence[SeedOutcome]]
) -> bool:
    baselines = {contrast.reference for contrast in contrasts if contrast.role == "baseline"}
    return any(run.diverged for arm in baselines for run in outcomes.get(arm, ()))


def _named(verdict: ContrastVerdict, part: str) -> ContrastVerdict:
    """Return the verdict with the part in the names of its runs."""
    values = {f"{part}{arm}": losses for arm, losses in verdict.values.items()}
    return replace(verdict, contrast=_in_part(part, verdict.contrast), values=values)


# Names and changes.


def _changes(plan: VerdictPlan) -> list[str]:
    """Return the remark on settings that differ from the first recorded rule."""
    if not plan.former:
        return []
    first, now = plan.former[0]["rule"], plan.rule_record
    changed = [name for name in now if first.get(name) != now[name]]
    return [f"rule changed after results: {', '.join(changed) or 'now as before'}"]


def _in_part(part: str, contrast: Contrast) -> Contrast:
    """Return the contrast with the name of its part before the names of its arms."""
    weights = {f"{part}{arm}": weight for arm, weight in contrast.weights.items()}
    reference = contrast.reference and f"{part}{contrast.reference}"
    return Contrast(f"{part}{contrast.step}", reference, contrast.role, weights)


def _named_contrasts(parts: Iterable[tuple[str, Sequence[Contrast]]]) -> dict[str, Contrast]:
    """Return the comparisons of all parts by name."""
    return {contrast_name(part, c): _in_part(part, c) for part, each in parts for c in each}


def contrast_name(part: str, contrast: Contrast) -> str:
    """Return the name of a comparison of the part ``part`` of a study."""
    return _in_part(part, contrast).name
