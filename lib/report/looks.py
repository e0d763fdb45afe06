"""Looks: the numbers of seeds after which a study is judged, and the part of alpha that each spends.

Each look j tests the undecided comparisons at ``share_j * alpha``. The shares of all looks sum to at
most 1, so the probability of a false word stays below alpha at any number of looks (union bound; the
plain form of the group-sequential procedures in Tamhane et al. 2021). What the planned looks leave
is the reserve: each unplanned look takes half of the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from lib.report.contrasts import Contrast
from lib.report.options import LookPlan, sum_of_shares
from lib.report.verdicts import ContrastVerdict, VerdictWord

# Words that decide a comparison.
LASTING_WORDS = (VerdictWord.BETTER, VerdictWord.WORSE, VerdictWord.EQUIVALENT)


@dataclass(frozen=True)
class Look:
    """A look that was taken: the study judged after ``n`` complete blocks."""

    number: int
    n: int
    share: float
    # False if the share came out of the reserve.
    planned: bool
    # Seeds of the complete blocks.
    seeds: tuple[int, ...] = ()
    # Whether only comparisons were judged that were added after the look before, at the same seeds.
    is_at_added: bool = False
    # Names of the comparisons that need no further seeds.
    closed: frozenset[str] = frozenset()
    # Name → runs of each comparison that was planned.
    family: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # Name → verdict of each comparison that was judged at this look.
    verdicts: Mapping[str, ContrastVerdict] = field(default_factory=dict)

    @property
    def words(self) -> dict[str, ContrastVerdict]:
        """Return the decisions of this look."""
        return {name: v for name, v in self.verdicts.items() if v.word in LASTING_WORDS}

    def to_json(self) -> dict[str, Any]:
        """Return the look as plain JSON types."""
        return {
            "look": self.number,
            "n": self.n,
            "share": self.share,
            "planned": self.planned,
            "added": self.is_at_added,
            "seeds": list(self.seeds),
            "closed": sorted(self.closed),
            "family": {name: sorted(arms) for name, arms in self.family.items()},
            "verdicts": {name: verdict.to_json() for name, verdict in self.verdicts.items()},
        }


@dataclass(frozen=True)
class LookSchedule:
    """The planned looks of a study, and those taken so far, the oldest first."""

    plan: LookPlan
    taken: tuple[Look, ...] = ()

    @property
    def last(self) -> Look | None:
        """Return the last look that was taken; None before the first."""
        return self.taken[-1] if self.taken else None

    @property
    def words(self) -> dict[str, ContrastVerdict]:
        """Return the decisions of all looks by the name of their comparison."""
        return {name: verdict for look in self.taken for name, verdict in look.words.items()}

    @property
    def standing(self) -> dict[str, ContrastVerdict]:
        """Return the verdicts of all looks at the seeds of the last one, by name."""
        return {
            name: verdict
            for look in self.taken
            if look.n == self._judged
            for name, verdict in look.verdicts.items()
        }

    def added(self, family: Mapping[str, Contrast]) -> frozenset[str]:
        """Return the undecided comparisons of ``family`` that were not planned at the last look.

        Empty if that look is to be judged again. Among them are those with other runs, such as the
        effects of a design after another of its cells can be configured.
        """
        if self.last is None or not self.last.family:
            return frozenset()
        planned, decided = self.last.family, self.words.keys()
        return frozenset(
            name
            for name, contrast in family.items()
            if name not in decided and planned.get(name) != frozenset(contrast.weights)
        )

    def concerns(self, family: Mapping[str, Contrast]) -> bool:
        """Return whether a look was at runs of ``family``: otherwise, they are another study."""
        arms = {arm for contrast in family.values() for arm in contrast.weights}
        return self.last is not None and any(arms & runs for runs in self.last.family.values())

    def look_at_added(self) -> Look | None:
        """Return the unplanned look at comparisons added after the last look; None without alpha."""
        assert self.last is not None
        share, number = self._half_of_reserve(), len(self.taken) + 1
        return Look(number, self.last.n, share, planned=False, is_at_added=True) if share else None

    def spent(self, alpha: float) -> float:
        """Return the part of ``alpha`` that the looks have spent."""
        return float(sum_of_shares([look.share for look in self.taken]) * Decimal(repr(alpha)))

    def with_look(self, look: Look) -> "LookSchedule":
        """Return the schedule after ``look``, which may be the last one, judged again."""
        earlier = [each for each in self.taken if each.number < look.number]
        return LookSchedule(self.plan, (*earlier, look))

    def judged_again(self) -> "LookSchedule":
        """Return the schedule without verdicts, for another rule; the spent alpha remains."""
        looks = [replace(look, verdicts={}) for look in self.taken]
        looks[-1:] = [replace(look, closed=frozenset(), family={}) for look in looks[-1:]]
        return LookSchedule(self.plan, tuple(looks))

    def next_planned(self) -> int | None:
        """Return the number of seeds of the next planned look; None if none is left."""
        return next((n for n in self.plan.seeds if n > self._judged), None)

    def due(self, n: int) -> Look | None:
        """Return the look to take after ``n`` blocks; None if none is due, or no alpha is left."""
        if n <= self._judged:
            return None
        waiting = [
            (seeds, share)
            for seeds, share in zip(self.plan.seeds, self.plan.shares, strict=True)
            if seeds > self._judged
        ]
        number = len(self.taken) + 1
        if not waiting:
            share = self._half_of_reserve()
            return Look(number, n, share, planned=False) if share else None
        # The share of a skipped planned look is lost.
        shares = [share for seeds, share in waiting if seeds <= n]
        return Look(number, n, shares[-1], planned=True) if shares else None

    def share_at(self, n: int) -> float:
        """Return the share of the look that decides about ``n`` seeds, if it is the next one."""
        for seeds, share in zip(self.plan.seeds, self.plan.shares, strict=True):
            if seeds > self._judged and seeds >= n:
                return share
        return self._half_of_reserve()

    @property
    def _judged(self) -> int:
        return self.taken[-1].n if self.taken else 0

    def _half_of_reserve(self) -> float:
        unplanned = [look.share for look in self.taken if not look.planned]
        left = self.plan.reserve - sum_of_shares(unplanned)
        return float(max(Decimal(0), left / 2))
