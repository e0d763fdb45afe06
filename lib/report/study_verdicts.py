"""Verdicts on the runs of a study: a function of its runs, its rule and its declarations.

Words are given at looks (lib/report/declarations.py) and are not stored: all looks are judged anew, in
order, on the runs that are there now. A word of an earlier look stands for the later ones. A
comparison is judged as soon as its own runs have ended.
"""

import copy
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any

from lib.report.contrasts import AA_ROLE, EFFECT, Contrast, DesignEffects
from lib.report.declarations import (
    DECLARATIONS_FILE,
    Declarations,
    DeclaredPlan,
    Family,
    Look,
    LookSchedule,
    VerdictPlan,
    append_declarations,
    family_size,
    is_declared,
)
from lib.report.statistics import PART_FACTOR, WHOLE_ALPHA, ErrorLevel
from lib.report.verdicts import SeedOutcome, VerdictWord, judge

VERDICTS_FILE = "verdicts.json"
# Remark on every verdict of a study with an A/A step that differs.
AA_FAILED = "A/A step failed"
# Words that decide a comparison.
LASTING_WORDS = (VerdictWord.BETTER, VerdictWord.WORSE, VerdictWord.EQUIVALENT)

# As in the document of the study.
Verdict = dict[str, Any]
# Name of a part, its planned comparisons, and the outcomes of its runs by variant.
StudyPart = tuple[str, Sequence[Contrast], Mapping[str, Sequence[SeedOutcome]]]


def declare(
    plan: VerdictPlan,
    parts: Sequence[StudyPart] = (),
    evaluation_set: str = "",
    at: float | None = None,
) -> VerdictPlan:
    """Return ``plan`` after it is declared, and with it the look that is due, before it is judged.

    Both are appended to the file in its folder; at the time ``at``, by default now. A plan without
    looks, or that takes none, is returned as it is.
    """
    if plan.looks is None or plan.exploratory:
        return plan
    now = time.time() if at is None else at

    def missing(known: Declarations) -> list[DeclaredPlan | Look]:
        study = StudyVerdicts(parts, replace(plan, declarations=known))
        return [*study.new_plan(now), *study.new_looks(now, evaluation_set)]

    before = len(StudyVerdicts(parts, plan).looks)
    if plan.folder is None:
        lines = (*plan.declarations.lines, *missing(plan.declarations))
        known = replace(plan.declarations, lines=lines)
    else:
        known = append_declarations(plan.folder, missing)
    plan = replace(plan, declarations=known)
    return replace(plan, taken=next(iter(StudyVerdicts(parts, plan).looks[before:]), None))


class StudyVerdicts:
    """The verdicts on all parts of a study, such as its arms, as one family."""

    def __init__(
        self,
        parts: Sequence[StudyPart],
        plan: VerdictPlan,
        control_parts: Sequence[StudyPart] = (),
        effects: DesignEffects | None = None,
        evaluation_set: str = "",
        same_documents: Sequence[str] = (),
    ) -> None:
        """Take the parts of a study: their names, "" for the only one, comparisons, and outcomes.

        ``control_parts`` have the comparisons of A/A steps and repeats, ``effects`` those of a
        factorial design.
        """
        self.plan, self.effects = plan, effects
        self.shown: Set[str] | None = None
        self.evaluation_set, self.same_documents = evaluation_set, same_documents
        self.parts = [_named_contrasts([(part, contrasts)]) for part, contrasts, _ in parts]
        self.controls = _named_contrasts((part, contrasts) for part, contrasts, _ in control_parts)
        compared = {name: c for contrasts in self.parts for name, c in contrasts.items()}
        self.family = plan.contrasts | compared
        self.outcomes: dict[str, list[SeedOutcome]] = {}
        for part, _, outcomes in (*parts, *control_parts):
            for arm, runs in outcomes.items():
                self.outcomes[f"{part}{arm}"] = list(runs)
        self.ended = {
            arm: {run.seed for run in runs if run.ended} for arm, runs in self.outcomes.items()
        }
        self.arms = {
            arm: plan.configurations.get(arm, "") for c in self.family.values() for arm in c.weights
        }
        known = plan.declarations.concerning(self.arms)
        self.known = known
        self.looks: list[Look] = []
        self.schedule = None
        if plan.looks is not None:
            self.looks = known.looks
            first = next((i for i, line in enumerate(known.lines) if isinstance(line, Look)), 0)
            in_force = Declarations(known.lines[:first]).plans
            looks = in_force[-1].looks if in_force else plan.looks
            self.schedule = LookSchedule(looks, tuple(self.looks))
        configured = plan.contrasts if plan.exploratory else self.family
        families = [*(line.family for line in known.lines), self._declared(configured)]
        self.planned = max(len(compared), family_size(families))

    def of_arms(self, shown: Set[str]) -> "StudyVerdicts":
        """Return the same verdicts without the comparisons of other arms, which are left out."""
        part = copy.copy(self)
        part.shown = shown
        return part

    @property
    def baseline_diverged(self) -> bool:
        """Return whether a seed of a baseline diverged, which ends the study."""
        baselines = {
            c.reference for part in self.parts for c in part.values() if c.role == "baseline"
        }
        return any(run.diverged for arm in baselines for run in self.outcomes.get(arm, ()))

    def _declared(self, contrasts: Mapping[str, Contrast]) -> Family:
        return {name: self._arms_of(contrast) for name, contrast in contrasts.items()}

    def _arms_of(self, contrast: Contrast) -> dict[str, str]:
        return {arm: self.arms.get(arm, "") for arm in contrast.weights}

    # Declaring.

    def new_plan(self, at: float) -> list[DeclaredPlan]:
        """Return the declaration of the plan, if the last one of this study is another."""
        plan, known = self.plan, self.known.plans
        assert plan.looks is not None
        seeds = self.seeds
        if not self.family or not seeds:
            return []
        now = DeclaredPlan(plan.rule_record, plan.looks, seeds, self._declared(self.family), at)
        last = known[-1] if known else None
        return [] if last and replace(last, at=at, imported=False) == now else [now]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Return the declared seeds."""
        return tuple(
            sorted(self.plan.seeds or {run.seed for runs in self.outcomes.values() for run in runs})
        )

    def new_looks(self, at: float, evaluation_set: str) -> list[Look]:
        """Return the look that is due, or the looks with comparisons whose runs have ended since."""
        look = self._due()
        if look is not None:
            family = self._declared(self.family)
            look = replace(look, family=family, evaluation_set=evaluation_set, at=at)
            return [replace(look, judged=dict.fromkeys(self._judged_at(look), at))]
        later = []
        for look in self.looks:
            arrived = [name for name in self._judged_at(look) if name not in look.judged]
            if arrived:
                later.append(
                    replace(look, judged=dict.fromkeys(arrived, at), at=at, imported=False)
                )
        return later

    def _due(self) -> Look | None:
        """Return the look at the declared seeds: a new one, or one at added comparisons, or none.

        It is due as soon as the runs of an undecided comparison have ended. A seed of an earlier look
        may not be omitted, whatever its outcome.
        """
        schedule, seeds = self.schedule, self.seeds
        if schedule is None or len(seeds) < self.plan.rule.min_seeds:
            return None
        if any(not set(look.seeds) <= set(seeds) for look in self.looks):
            return None
        if schedule.last is None or schedule.last.n < len(seeds):
            waiting = [
                c for name, c in self.family.items() if name not in self._closed_at(len(self.looks))
            ]
            look = schedule.due(len(seeds))
        else:
            waiting = [
                c for name, c in self.family.items() if not self._declared_before(name, None)
            ]
            share, number = schedule.reserve_share, len(self.looks) + 1
            look = Look(number, len(seeds), share, planned=False, is_at_added=True)
            look = look if share else None
        if look is None or not any(self._has_ended(c, seeds) for c in waiting):
            return None
        return replace(look, seeds=seeds)

    def _declared_before(self, name: str, look: Look | None) -> bool:
        """Return whether a look before ``look`` had the comparison in its family."""
        earlier = self.looks if look is None else self.looks[: look.number - 1]
        return any(self._is_in(name, each.family) for each in earlier)

    def _is_in(self, name: str, family: Family) -> bool:
        return is_declared(name, self._arms_of(self.family[name]), family)

    def _has_ended(self, contrast: Contrast, seeds: Iterable[int]) -> bool:
        return all(set(seeds) <= self.ended.get(arm, set()) for arm in contrast.weights)

    def _concerned(self, look: Look) -> list[str]:
        """Return the comparisons that the look may judge."""
        return [
            name
            for name in self.family
            if self._is_in(name, look.family)
            and not (look.is_at_added and self._declared_before(name, look))
        ]

    def _judged_at(self, look: Look) -> list[str]:
        concerned = self._concerned(look)
        return [name for name in concerned if self._has_ended(self.family[name], look.seeds)]

    # Judging.

    @property
    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each comparison of the shown arms."""
        return self._of_shown(self.judged)

    def _of_shown(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        shown = self.shown
        return [v for v in verdicts if shown is None or v["weights"].keys() <= shown]

    @cached_property
    def judged(self) -> list[Verdict]:
        """Return the verdict on each comparison."""
        marks = [*self._rule_changes(), *([AA_FAILED] if self.aa_failed else [])]
        level = WHOLE_ALPHA if self.schedule is None else None
        given, decided, _ = self._replayed
        verdicts = []
        for part in self.parts:
            for verdict in self._judged(list(part), self.outcomes, level):
                name = verdict["name"]
                if level is None:
                    verdict = self._shown(verdict, given.get(name), name in decided)
                verdicts.append({**verdict, "remarks": [*verdict["remarks"], *marks]})
        return verdicts

    @property
    def closed(self) -> list[frozenset[str]]:
        """Return, of each look, the comparisons that need no further seeds after it."""
        return self._replayed[2]

    def _judged(
        self,
        names: Sequence[str],
        outcomes: Mapping[str, Sequence[SeedOutcome]],
        level: ErrorLevel | None,
        planned: int = 0,
        decided: Sequence[Verdict] = (),
    ) -> list[Verdict]:
        contrasts = [self.family[name] for name in names]
        rule = self.plan.rule
        if rule.variance == "factorial" and not any(c.role == EFFECT for c in contrasts):
            # Without effects of a design.
            rule = replace(rule, variance="shared")
        return judge(contrasts, outcomes, rule, planned or self.planned, level, decided)

    @cached_property
    def _replayed(
        self,
    ) -> tuple[dict[str, Verdict], dict[str, Verdict], list[frozenset[str]]]:
        """Return the verdicts of the last look at each comparison, the decisions, and what each look
        closed.
        """
        given: dict[str, Verdict] = {}
        decided: dict[str, Verdict] = {}
        closed: list[frozenset[str]] = []
        for look in self.looks:
            tested = [name for name in self._judged_at(look) if name not in decided]
            # A comparison that is closed without a decision, such as DIVERGED, needs no further runs.
            done = {*tested, *(closed[-1] if closed else ())}
            open_count = sum(name not in done for name in self._concerned(look))
            outcomes = self._outcomes_at(look)
            level = self._level(look, decided, not open_count)
            planned = self._planned_at(look)
            new: dict[str, Verdict] = {}
            for part in self.parts:
                names = [name for name in tested if name in part]
                standing = {k: v for k, v in decided.items() if k in part}
                if look.is_at_added:
                    # Those of the looks before at the same seeds.
                    standing |= {
                        k: v
                        for k, v in given.items()
                        if k in part and k not in names and look.n == len(self._look_seeds(v))
                    }
                earlier = list(standing.values())
                for verdict in self._judged(names, outcomes, level, planned, earlier):
                    new[verdict["name"]] = self._marked(verdict, look, open_count)
            given |= new
            decided |= {name: v for name, v in new.items() if v["verdict"] in LASTING_WORDS}
            closed.append(frozenset(name for name, v in given.items() if _is_closed(v)))
        if closed and self.baseline_diverged:
            closed[-1] = frozenset(self.family)
        return given, decided, closed

    def _outcomes_at(self, look: Look) -> dict[str, list[SeedOutcome]]:
        return {
            arm: [run for run in runs if run.seed in look.seeds]
            for arm, runs in self.outcomes.items()
        }

    def _level(self, look: Look, decided: Mapping[str, Verdict], is_complete: bool) -> ErrorLevel:
        assert self.schedule is not None
        after = LookSchedule(self.schedule.plan, self.schedule.taken[: look.number])
        if look.is_at_added:
            # The comparisons of earlier looks are not in the family of this one.
            decided = {}
        equivalent = sum(v["verdict"] is VerdictWord.EQUIVALENT for v in decided.values())
        differing = len(decided) - equivalent
        return ErrorLevel(look.share, is_complete, differing, equivalent, after.share_at)

    def _planned_at(self, look: Look) -> int:
        """Return the number of comparisons that were declared until the look."""
        if look.is_at_added:
            earlier = self.looks[: look.number - 1]
            return family_size(
                {name: arms}
                for name, arms in look.family.items()
                if not any(is_declared(name, arms, each.family) for each in earlier)
            )
        families = []
        for line in self.known.lines:
            families.append(line.family)
            if isinstance(line, Look) and line.seeds == look.seeds and not line.is_at_added:
                break
        return family_size(families)

    def _marked(self, verdict: Verdict, look: Look, open_count: int) -> Verdict:
        """Return the verdict with its look, and remarks on it."""
        if verdict["verdict"] in (None, VerdictWord.UNFAIR, VerdictWord.DIVERGED):
            return verdict
        assert self.schedule is not None
        remarks = list(verdict["remarks"])
        has_word = verdict["verdict"] in LASTING_WORDS
        if open_count and verdict["p"] is not None:
            own = verdict["variance"] == "own"
            cost = "nothing steps down" if own else f"p is {PART_FACTOR} times larger"
            count = f"{open_count} comparison{'s have' if open_count > 1 else ' has'}"
            remarks.append(f"until {count} all runs, {cost}")
        if has_word and any(not self._has_ended(c, look.seeds) for c in self._aa_contrasts()):
            remarks.append("its A/A step has not ended")
        if not look.planned:
            remarks.append("unplanned look")
        elif has_word and look.n < self.schedule.plan.seeds[-1]:
            remarks.append("stopped early: the estimate is biased away from 0")
        share = {"share": look.share, "alpha_of_look": verdict["alpha"] * look.share}
        return {**verdict, "look": look.number, **share, "remarks": remarks}

    def _shown(self, now: Verdict, given: Verdict | None, is_decided: bool) -> Verdict:
        """Return the verdict of the last look, or what all runs show without one."""
        if given is not None and is_decided:
            remarks = list(given["remarks"])
            if now["verdict"] is VerdictWord.DIVERGED:
                remarks.append(f"diverged since: {now['reason']}")
            return self._with_trained_again({**given, "remarks": remarks})
        if now["verdict"] in (VerdictWord.UNFAIR, VerdictWord.DIVERGED):
            return now
        if given is not None and set(now["seeds"]) <= self._look_seeds(given):
            return self._with_trained_again(given)
        if now["n"] < self.plan.rule.min_seeds:
            return now
        return {**now, "reason": self._wait(now)}

    def _look_seeds(self, verdict: Verdict) -> set[int]:
        number = verdict["look"]
        return set(self.looks[number - 1].seeds if number else verdict["seeds"])

    def _with_trained_again(self, verdict: Verdict) -> Verdict:
        """Return the verdict with a remark if its runs started after it was first given."""
        if verdict["look"] is None:
            return verdict
        given_at = self.looks[verdict["look"] - 1].judged.get(verdict["name"], math.inf)
        started = (
            run.started_at
            for arm in verdict["weights"]
            for run in self.outcomes.get(arm, ())
            if run.seed in verdict["seeds"] and run.started_at is not None
        )
        if max(started, default=0.0) <= given_at:
            return verdict
        return {**verdict, "remarks": [*verdict["remarks"], "its runs were trained again since"]}

    def _wait(self, verdict: Verdict) -> str:
        """Return the reason of a comparison that has enough seeds, but no word."""
        assert self.schedule is not None
        name, last = verdict["name"], self.schedule.last
        contrast = self.family[name]
        seeds: Sequence[int] = self.seeds
        if (
            last is not None
            and name in self._concerned(last)
            and not self._has_ended(contrast, last.seeds)
        ):
            seeds = last.seeds
        elif self.plan.exploratory:
            return "a table of selected steps or seeds takes no look"
        runs = [(arm, seed) for arm in contrast.weights for seed in seeds]
        open_runs = sum(seed not in self.ended.get(arm, ()) for arm, seed in runs)
        if open_runs:
            return f"waits for {open_runs} of its {len(runs)} runs"
        planned = [n for n in self.schedule.plan.seeds if n > self.schedule.judged]
        if planned and planned[0] > len(seeds):
            return f"next look at {planned[0]} seeds"
        if not self.schedule.share_at(len(seeds) + 1):
            return "no alpha is left for another look"
        return "next look at the next complete seed"

    @property
    def waiting(self) -> frozenset[str]:
        """Return the comparisons of the last look whose runs have not ended."""
        if not self.looks:
            return frozenset()
        look, earlier = self.looks[-1], self._closed_at(len(self.looks) - 1)
        return frozenset(self._concerned(look)) - {*self._judged_at(look), *earlier}

    def _closed_at(self, looks: int) -> frozenset[str]:
        """Return the comparisons that need no further seeds after that many looks."""
        return self.closed[looks - 1] if looks else frozenset()

    # A/A steps.
    #
    # Such a step is the baseline with other initial weights: a step without an effect by construction.
    # It is outside the family of comparisons and outside their mean variance: a paired t-test of its
    # own variance tests it alone, at the alpha of the look. A difference shows that the study claims
    # differences where none exist, and marks every verdict.

    def _aa_contrasts(self) -> list[Contrast]:
        controls = {c.name: c for c in self.plan.controls} | self.controls
        return [c for c in controls.values() if c.role == AA_ROLE]

    @property
    def aa_steps(self) -> list[Verdict]:
        """Return the verdict on each shown A/A step against its parent."""
        return self._of_shown(self._aa_steps[0])

    @property
    def aa_failed(self) -> bool:
        """Return whether an A/A step differs from its parent at any look."""
        return self._aa_steps[1]

    @cached_property
    def _aa_steps(self) -> tuple[list[Verdict], bool]:
        verdicts, failed = [], False
        alone = replace(self.plan.rule, variance="own")
        for contrast in self.controls.values():
            if contrast.role != AA_ROLE:
                continue
            level = WHOLE_ALPHA if self.schedule is None else None
            (shown,) = judge([contrast], self.outcomes, alone, 1, level)
            at_looks = [shown]
            for look in self.looks:
                if look.is_at_added or not self._has_ended(contrast, look.seeds):
                    continue
                outcomes = self._outcomes_at(look)
                at_looks += judge([contrast], outcomes, alone, 1, ErrorLevel(look.share))
                if set(shown["seeds"]) <= set(look.seeds) and shown["difference"] is not None:
                    shown = at_looks[-1]
            differing = (VerdictWord.BETTER, VerdictWord.WORSE)
            failed |= any(verdict["verdict"] in differing for verdict in at_looks)
            verdicts.append(shown)
        return verdicts, failed

    # What the declarations show.

    def _rule_changes(self) -> list[str]:
        """Return the remark on settings that differ from the first rule under which results existed."""
        first: Mapping[str, Any] | None = None
        in_force: Mapping[str, Any] | None = None
        later: list[Mapping[str, Any]] = [self.plan.rule_record]
        for line in self.known.lines:
            if first is None and (isinstance(line, Look) or self._has_result_before(line.at)):
                first = in_force
            if isinstance(line, DeclaredPlan):
                in_force = line.rule
                later += [in_force] if first is not None else []
        if first is None and self._has_result_before(math.inf):
            first = in_force
        now = self.plan.rule_record
        if first is None or all(rule == first for rule in later):
            return []
        changed = [name for name in {**now, **first} if first.get(name) != now.get(name)]
        return [f"rule changed after results: {', '.join(changed) or 'now as before'}"]

    def _has_result_before(self, at: float) -> bool:
        return any(
            run.loss is not None and run.ended_at is not None and run.ended_at < at
            for arm in self.arms
            for run in self.outcomes.get(arm, ())
        )

    @cached_property
    def notes(self) -> list[str]:
        """Return what the dates of the runs show that the declarations do not: they were shortened."""
        notes = []
        if self.plan.declarations.incomplete:
            notes.append(
                f"{DECLARATIONS_FILE}: a crash left a part of a line, which declares nothing"
            )
        if self.schedule is None or self.plan.folder is None:
            return notes
        early, lines = self._early_runs(), self.known.lines
        if early and not (lines and lines[0].imported):
            notes.append(
                f"{early} runs started before the first line of {DECLARATIONS_FILE}: looks and rules "
                "before it are unknown, and the error rate with them"
            )
        return notes + self._missing_looks()

    def _early_runs(self) -> int:
        """Return how many runs started before the first declaration."""
        first = self.known.lines[0].at if self.known.lines else math.inf
        return sum(
            run.started_at is not None and run.started_at < first - 1 and not run.reused
            for runs in self.outcomes.values()
            for run in runs
        )

    @property
    def is_declared_first(self) -> bool:
        """Return whether the rule was declared before the first run, and stayed as it was."""
        rules = [plan.rule for plan in self.known.plans]
        is_same = all(rule == self.plan.rule_record for rule in rules)
        return bool(rules) and is_same and not self._early_runs()

    def _missing_looks(self) -> list[str]:
        """Return a note for each declared list of seeds whose runs ended without its look."""
        notes = []
        for plan, following in itertools.pairwise(self.known.plans):
            seeds = set(plan.seeds)
            related = [set(look.seeds) for look in self.looks if look.at < following.at]
            if len(seeds) < self.plan.rule.min_seeds or plan.imported:
                continue
            if any(not look <= seeds or seeds <= look for look in related):
                continue
            arms = {
                arm
                for name, arms in plan.family.items()
                if name in self.family and self._is_in(name, plan.family)
                for arm in arms
            }
            ended = {
                (arm, run.seed): run.ended_at for arm in arms for run in self.outcomes.get(arm, ())
            }
            times = [ended.get((arm, seed)) for arm in arms for seed in seeds]
            if times and all(time is not None and time < following.at for time in times):
                notes.append(
                    f"the look at {len(seeds)} seeds, whose runs have ended, is missing in "
                    f"{DECLARATIONS_FILE}"
                )
        return list(dict.fromkeys(notes))


def _is_closed(verdict: Verdict) -> bool:
    """Return whether further seeds would not change the word."""
    is_open = verdict["verdict"] in (None, VerdictWord.INCONCLUSIVE)
    return not is_open or verdict["rounding_only"]


# Names.


def _in_part(part: str, contrast: Contrast) -> Contrast:
    """Return the contrast with the name of its part before the names of its arms."""
    weights = {f"{part}{arm}": weight for arm, weight in contrast.weights.items()}
    reference = contrast.reference and f"{part}{contrast.reference}"
    return Contrast(f"{part}{contrast.step}", reference, contrast.role, weights)


def _named_contrasts(parts: Iterable[tuple[str, Sequence[Contrast]]]) -> dict[str, Contrast]:
    """Return the comparisons of all parts by name."""
    named = [_in_part(part, contrast) for part, contrasts in parts for contrast in contrasts]
    return {contrast.name: contrast for contrast in named}
