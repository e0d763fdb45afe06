"""From the outcomes of a study's runs, its rule and its declarations to the words.

``declare`` appends the plan, and the look that is due. ``judge`` judges every look anew, in order, on
the runs of its seeds that are there now; each comparison has the verdict of its last look, or what its
runs show without one. A comparison is judged as soon as its own runs have ended.
"""

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any

from lib.report.contrasts import AA_ROLE, CONTROL_ROLES, EFFECT, REPEAT_ROLE, Contrast
from lib.report.declarations import (
    DECLARATIONS_FILE,
    DeclaredPlan,
    Family,
    Line,
    Look,
    VerdictPlan,
    append_declarations,
    concerning,
    due_look,
    family_size,
    is_declared,
    judged_seeds,
    looks_of,
    plans_of,
    reserve_share,
    share_at,
)
from lib.report.statistics import PART_FACTOR, ErrorLevel, VerdictRule
from lib.report.verdicts import Outcomes, VerdictWord, estimates, verdicts_at
from lib.units import count

# Remark on every verdict of a study with an A/A step that differs.
AA_FAILED = "A/A step failed"
# Words that decide a comparison.
LASTING_WORDS = (VerdictWord.BETTER, VerdictWord.WORSE, VerdictWord.EQUIVALENT)

# As in the document of the study.
Verdict = dict[str, Any]


def declare(
    plan: VerdictPlan,
    contrasts: Sequence[Contrast] = (),
    outcomes: Outcomes | None = None,
    evaluation_set: str = "",
    at: float | None = None,
) -> VerdictPlan:
    """Return ``plan`` after it and the look that is due are declared, at the time ``at`` or now: they
    are appended to the file in its folder. An exploratory plan is returned as it is.
    """
    if plan.exploratory:
        return plan
    now = time.time() if at is None else at

    def of(known: Sequence[Line]) -> "_Study":
        return _Study(contrasts, outcomes or {}, replace(plan, declarations=tuple(known)))

    def missing(known: Sequence[Line]) -> list[Line]:
        study = of(known)
        return [*study.new_plan(now), *study.new_looks(now, evaluation_set)]

    if plan.folder is None:
        lines = (*plan.declarations, *missing(plan.declarations))
    else:
        lines = append_declarations(plan.folder, missing)
    taken = of(lines).looks[len(of(plan.declarations).looks) :]
    return replace(plan, declarations=lines, taken=taken[0] if taken else None)


def judge(contrasts: Sequence[Contrast], outcomes: Outcomes, plan: VerdictPlan) -> dict[str, Any]:
    """Return the verdicts of a study and what they rest on.

    ``contrasts`` are the comparisons of the runs that are there, those of A/A steps and repeats
    included. ``closed`` lists, for each of the ``looks``, the comparisons that need no further seeds
    after it, ``waiting`` those of the last one whose runs have not ended.
    """
    study = _Study(contrasts, outcomes, plan)
    aa_steps, aa_failed = study.aa_steps()
    return {
        "verdicts": study.verdicts([*study.rule_changes(), *[AA_FAILED] * aa_failed]),
        "aa_steps": aa_steps,
        "aa_failed": aa_failed,
        "family": study.family,
        "planned": study.planned,
        "look_plan": study.look_plan,
        "looks": study.looks,
        "closed": study.closed[1:],
        "waiting": study.waiting(),
        "baseline_diverged": study.baseline_diverged,
        "is_declared_first": study.is_declared_first(),
        "notes": study.notes(),
        "repeats": study.repeats(),
    }


class _Study:
    """The comparisons and runs of a study, which are one family, and the lines that concern it."""

    def __init__(
        self, contrasts: Sequence[Contrast], outcomes: Outcomes, plan: VerdictPlan
    ) -> None:
        self.plan, self.outcomes = plan, outcomes
        compared = {c.name: c for c in contrasts if c.role not in CONTROL_ROLES}
        self.compared = compared
        self.controls = {c.name: c for c in contrasts if c.role in CONTROL_ROLES}
        self.family = plan.contrasts | compared
        self.ended = {arm: {r.seed for r in runs if r.ended} for arm, runs in outcomes.items()}
        self.arms = {
            arm: plan.configurations.get(arm, "") for c in self.family.values() for arm in c.weights
        }
        self.known = concerning(plan.declarations, self.arms)
        self.looks = looks_of(self.known)
        # The looks of the plan before the first look stay in force.
        first = next((i for i, each in enumerate(self.known) if isinstance(each, Look)), 0)
        declared = [each.look_plan for each in plans_of(self.known[:first])]
        self.look_plan = declared[-1] if declared else plan.looks
        configured = plan.contrasts if plan.exploratory else self.family
        families = [*(line.family for line in self.known), self._declared(configured)]
        self.planned = max(len(compared), family_size(families))

    @property
    def baseline_diverged(self) -> bool:
        baselines = {c.reference for c in self.compared.values() if c.role == "baseline"}
        return any(run.diverged for arm in baselines for run in self.outcomes.get(arm, ()))

    def _declared(self, contrasts: Mapping[str, Contrast]) -> Family:
        return {name: self._arms_of(contrast) for name, contrast in contrasts.items()}

    def _arms_of(self, contrast: Contrast) -> dict[str, str]:
        return {arm: self.arms.get(arm, "") for arm in contrast.weights}

    # Declaring.

    def new_plan(self, at: float) -> list[Line]:
        """Return the declaration of the plan, if the last one of this study is another."""
        if not self.family or not self.seeds:
            return []
        rule, family = self.plan.rule_record, self._declared(self.family)
        now = DeclaredPlan(rule, self.plan.looks, self.seeds, family, at)
        last = plans_of(self.known)[-1:]
        return [] if last and replace(last[0], at=at, imported=False) == now else [now]

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        found = (run.seed for runs in self.outcomes.values() for run in runs)
        return tuple(sorted(self.plan.seeds or set(found)))

    def new_looks(self, at: float, evaluation_set: str) -> list[Line]:
        """Return the look that is due, or the looks with comparisons whose runs have ended since."""
        if look := self._due():
            family = self._declared(self.family)
            look = replace(look, family=family, evaluation_set=evaluation_set, at=at)
            return [replace(look, judged=dict.fromkeys(self._judged_at(look), at))]
        later = [
            (look, {name: at for name in self._judged_at(look) if name not in look.judged})
            for look in self.looks
        ]
        return [
            replace(look, judged=arrived, at=at, imported=False)
            for look, arrived in later
            if arrived
        ]

    def _due(self) -> Look | None:
        """Return the look at the declared seeds: a new one, or one at added comparisons, or none.

        It is due as soon as the runs of an undecided comparison have ended. A seed of an earlier look
        may not be omitted, whatever its outcome.
        """
        seeds, looks = self.seeds, self.looks
        is_short = len(seeds) < self.plan.rule.min_seeds
        if is_short or any(not set(look.seeds) <= set(seeds) for look in looks):
            return None
        if judged_seeds(looks) < len(seeds):
            waiting = self.family.keys() - self.closed[-1]
            look = due_look(self.look_plan, looks, len(seeds))
        else:
            waiting = {name for name in self.family if not self._is_looked_at(name, looks)}
            share = reserve_share(self.look_plan, looks)
            look = Look(len(looks) + 1, len(seeds), share, False, added=True) if share else None
        if look is None or not any(self._has_ended(self.family[name], seeds) for name in waiting):
            return None
        return replace(look, seeds=seeds)

    def _is_looked_at(self, name: str, looks: Iterable[Look]) -> bool:
        return any(self._is_in(name, look.family) for look in looks)

    def _is_in(self, name: str, family: Family) -> bool:
        return is_declared(name, self._arms_of(self.family[name]), family)

    def _has_ended(self, contrast: Contrast, seeds: Iterable[int]) -> bool:
        return all(set(seeds) <= self.ended.get(arm, set()) for arm in contrast.weights)

    def _concerned(self, look: Look) -> list[str]:
        earlier = self.looks[: look.number - 1] if look.added else ()
        return [
            name
            for name in self.family
            if self._is_in(name, look.family) and not self._is_looked_at(name, earlier)
        ]

    def _judged_at(self, look: Look) -> list[str]:
        concerned = self._concerned(look)
        return [name for name in concerned if self._has_ended(self.family[name], look.seeds)]

    # Judging.

    def verdicts(self, marks: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each comparison, with the ``marks`` of the study as remarks."""
        verdicts = []
        for part in self._parts:
            contrasts = [self.compared[name] for name in part]
            rule = self._rule_of(contrasts)
            for now in estimates(contrasts, self.outcomes, rule, self.planned):
                verdict = self._shown(now)
                verdicts.append({**verdict, "remarks": [*verdict["remarks"], *marks]})
        return verdicts

    @cached_property
    def _parts(self) -> list[list[str]]:
        """Return the comparisons of each part of the study: each part has a variance of its own."""
        parts: dict[str, list[str]] = {}
        for name, contrast in self.compared.items():
            parts.setdefault(contrast.part, []).append(name)
        return list(parts.values())

    def _rule_of(self, contrasts: Sequence[Contrast]) -> VerdictRule:
        """Return the rule; comparisons of a design without its effects have the rule shared."""
        rule = self.plan.rule
        if rule.variance != "factorial" or any(c.role == EFFECT for c in contrasts):
            return rule
        return replace(rule, variance="shared")

    @cached_property
    def _replayed(
        self,
    ) -> tuple[dict[str, Verdict], dict[str, Verdict], list[frozenset[str]]]:
        """Return the verdicts of the last look at each comparison, the decisions, and what needs no
        further seeds before and after each look.
        """
        given: dict[str, Verdict] = {}
        decided: dict[str, Verdict] = {}
        closed: list[frozenset[str]] = [frozenset()]
        for look in self.looks:
            tested = [name for name in self._judged_at(look) if name not in decided]
            # A comparison that is closed without a decision, such as DIVERGED, needs no further runs.
            done = {*tested, *closed[-1]}
            open_count = sum(name not in done for name in self._concerned(look))
            level = self._level(look, decided, not open_count)
            planned, outcomes = self._planned_at(look), self._outcomes_at(look)
            new: dict[str, Verdict] = {}
            for part in self._parts:
                names = [name for name in tested if name in part]
                standing = {k: v for k, v in decided.items() if k in part}
                if look.added:
                    # Those of the looks before at the same seeds.
                    standing |= {
                        k: v
                        for k, v in given.items()
                        if k in part and k not in names and look.n == len(self._look_seeds(v))
                    }
                contrasts, earlier = [self.family[name] for name in names], list(standing.values())
                rule = self._rule_of(contrasts)
                for verdict in verdicts_at(contrasts, outcomes, rule, planned, level, earlier):
                    new[verdict["name"]] = self._marked(verdict, look, open_count)
            given |= new
            decided |= {name: v for name, v in new.items() if v["verdict"] in LASTING_WORDS}
            undecided = (None, VerdictWord.INCONCLUSIVE)
            ended = (
                name
                for name, v in given.items()
                if v["verdict"] not in undecided or v["rounding_only"]
            )
            closed.append(frozenset(ended))
        if self.looks and self.baseline_diverged:
            closed[-1] = frozenset(self.family)
        return given, decided, closed

    @property
    def closed(self) -> list[frozenset[str]]:
        return self._replayed[2]

    def _outcomes_at(self, look: Look) -> Outcomes:
        return {
            arm: [run for run in runs if run.seed in look.seeds]
            for arm, runs in self.outcomes.items()
        }

    def _level(self, look: Look, decided: Mapping[str, Verdict], is_complete: bool) -> ErrorLevel:
        plan, taken = self.look_plan, self.looks[: look.number]
        # The comparisons of earlier looks are not in the family of one at added comparisons.
        words = [v["verdict"] for v in decided.values() if not look.added]
        equivalent = words.count(VerdictWord.EQUIVALENT)
        differing = len(words) - equivalent
        return ErrorLevel(
            look.share, is_complete, differing, equivalent, lambda n: share_at(plan, taken, n)
        )

    def _planned_at(self, look: Look) -> int:
        if look.added:
            earlier = self.looks[: look.number - 1]
            return family_size(
                {name: arms}
                for name, arms in look.family.items()
                if not any(is_declared(name, arms, each.family) for each in earlier)
            )
        families = []
        for line in self.known:
            families.append(line.family)
            if isinstance(line, Look) and line.seeds == look.seeds and not line.added:
                break
        return family_size(families)

    def _marked(self, verdict: Verdict, look: Look, open_count: int) -> Verdict:
        if verdict["verdict"] in (None, VerdictWord.UNFAIR, VerdictWord.DIVERGED):
            return verdict
        remarks, has_word = list(verdict["remarks"]), verdict["verdict"] in LASTING_WORDS
        if open_count and verdict["p"] is not None:
            own = verdict["variance"] == "own"
            cost = "nothing steps down" if own else f"p is {PART_FACTOR} times larger"
            others = f"{open_count} comparison{'s have' if open_count > 1 else ' has'}"
            remarks.append(f"until {others} all runs, {cost}")
        controls = {c.name: c for c in self.plan.declared if c.role == AA_ROLE} | self.controls
        aa_steps = [c for c in controls.values() if c.role == AA_ROLE]
        if has_word and any(not self._has_ended(c, look.seeds) for c in aa_steps):
            remarks.append("its A/A step has not ended")
        if not look.planned:
            remarks.append("unplanned look")
        elif has_word and look.n < self.look_plan.seeds[-1]:
            remarks.append("stopped early: the estimate is biased away from 0")
        share = {"share": look.share, "alpha_of_look": verdict["alpha"] * look.share}
        return {**verdict, "look": look.number, **share, "remarks": remarks}

    def _shown(self, now: Verdict) -> Verdict:
        """Return the verdict of the last look, or what all runs show without one."""
        known, decided, _ = self._replayed
        given = known.get(now["name"])
        if given is not None and now["name"] in decided:
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
        return {**now, "reason": self._wait(now["name"])}

    def _look_seeds(self, verdict: Verdict) -> set[int]:
        number = verdict["look"]
        return set(self.looks[number - 1].seeds if number else verdict["seeds"])

    def _with_trained_again(self, verdict: Verdict) -> Verdict:
        """Return the verdict with a remark if its runs started after it was first given."""
        if verdict["look"] is None:
            return verdict
        given_at = self.looks[verdict["look"] - 1].judged.get(verdict["name"], math.inf)
        runs = (run for arm in verdict["weights"] for run in self.outcomes.get(arm, ()))
        started = (run.started_at or 0.0 for run in runs if run.seed in verdict["seeds"])
        if max(started, default=0.0) <= given_at:
            return verdict
        return {**verdict, "remarks": [*verdict["remarks"], "its runs were trained again since"]}

    def _wait(self, name: str) -> str:
        contrast, seeds = self.family[name], self.seeds
        # The look at most seeds, the latest of them.
        last = max(reversed(self.looks), key=lambda look: look.n, default=None)
        if last and name in self._concerned(last) and not self._has_ended(contrast, last.seeds):
            seeds = last.seeds
        elif self.plan.exploratory:
            return "a table of selected steps or seeds takes no look"
        runs = [(arm, seed) for arm in contrast.weights for seed in seeds]
        if open_runs := sum(seed not in self.ended.get(arm, ()) for arm, seed in runs):
            return f"waits for {open_runs} of its {len(runs)} runs"
        planned = [n for n in self.look_plan.seeds if n > judged_seeds(self.looks)]
        if planned and planned[0] > len(seeds):
            return f"next look at {planned[0]} seeds"
        if not share_at(self.look_plan, self.looks, len(seeds) + 1):
            return "no alpha is left for another look"
        return "next look at the next complete seed"

    def waiting(self) -> frozenset[str]:
        if not self.looks:
            return frozenset()
        look = self.looks[-1]
        return frozenset(self._concerned(look)) - {*self._judged_at(look), *self.closed[-2]}

    def aa_steps(self) -> tuple[list[Verdict], bool]:
        """Return the verdict on each A/A step against its parent, tested alone with its own variance,
        and whether one differs at any look.
        """
        verdicts, failed = [], False
        alone = replace(self.plan.rule, variance="own")
        for contrast in (c for c in self.controls.values() if c.role == AA_ROLE):
            (shown,) = estimates([contrast], self.outcomes, alone, 1)
            at_looks: list[Verdict] = []
            for look in self.looks:
                if look.added or not self._has_ended(contrast, look.seeds):
                    continue
                outcomes = self._outcomes_at(look)
                at_looks += verdicts_at([contrast], outcomes, alone, 1, ErrorLevel(look.share))
                if set(shown["seeds"]) <= set(look.seeds) and shown["difference"] is not None:
                    shown = at_looks[-1]
            differing = (VerdictWord.BETTER, VerdictWord.WORSE)
            failed |= any(verdict["verdict"] in differing for verdict in at_looks)
            verdicts.append(shown)
        return verdicts, failed

    def repeats(self) -> dict[str, dict[int, float]]:
        """Return the differences of each repeat to the first training of its seeds."""
        repeats: dict[str, dict[int, float]] = {}
        for contrast in (c for c in self.controls.values() if c.role == REPEAT_ROLE):
            again, first = (
                {r.seed: r.loss for r in self.outcomes.get(arm, ()) if r.loss is not None}
                for arm in (contrast.step, contrast.reference)
            )
            seeds = sorted(again.keys() & first.keys())
            repeats[contrast.step] = {seed: again[seed] - first[seed] for seed in seeds}
        return repeats

    # What the declarations show.

    def rule_changes(self) -> list[str]:
        """Return the remark on settings that differ from the first rule under which results existed."""
        first: Mapping[str, Any] | None = None
        in_force: Mapping[str, Any] | None = None
        now = self.plan.rule_record
        later: list[Mapping[str, Any]] = [now]
        for line in self.known:
            if first is None and (isinstance(line, Look) or self._has_result_before(line.at)):
                first = in_force
            if isinstance(line, DeclaredPlan):
                in_force = line.rule
                later += [in_force] if first is not None else []
        if first is None and self._has_result_before(math.inf):
            first = in_force
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

    def is_declared_first(self) -> bool:
        """Return whether the rule was declared before the first run, and stayed as it was."""
        rules = [plan.rule for plan in plans_of(self.known)]
        return bool(rules) and rules.count(self.plan.rule_record) == len(rules) and not self.early

    @cached_property
    def early(self) -> int:
        """Return the number of runs that started before the first declaration."""
        first = self.known[0].at if self.known else math.inf
        return sum(
            run.started_at is not None and run.started_at < first - 1 and not run.reused
            for runs in self.outcomes.values()
            for run in runs
        )

    def notes(self) -> list[str]:
        """Return what the dates of the runs show that the declarations do not: they were shortened."""
        if self.plan.folder is None or not self.known:
            return []
        notes = []
        if self.early and not self.known[0].imported:
            notes.append(
                f"{count(self.early, 'run')} started before the first line of {DECLARATIONS_FILE}: looks "
                "and rules before it are unknown, and the error rate with them"
            )
        # Each declared list of seeds whose runs ended without its look.
        for plan, following in itertools.pairwise(plans_of(self.known)):
            if len(plan.seeds) >= self.plan.rule.min_seeds and not plan.imported:
                notes += self._missing_look(plan, following.at)
        return list(dict.fromkeys(notes))

    def _missing_look(self, plan: DeclaredPlan, at: float) -> list[str]:
        """Return a note if all runs of a plan ended before ``at``, and its look is not declared."""
        seeds: Set[int] = set(plan.seeds)
        related = [set(look.seeds) for look in self.looks if look.at < at]
        if any(not look <= seeds or seeds <= look for look in related):
            return []
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
        if not times or any(time is None or time >= at for time in times):
            return []
        return [
            f"the look at {len(seeds)} seeds, whose runs have ended, is missing in {DECLARATIONS_FILE}"
        ]
