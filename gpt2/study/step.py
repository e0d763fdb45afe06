"""Steps of an ablation study: the symbols each step sets, its parent step, and step selection."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lib.config.field import SymbolValue
from lib.errors import ConfigError, Problem, nearest

SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# Ends of the names of the runs that a plan adds to the baseline: other initial weights, the same again.
AA, AGAIN = "aa", "again"
DEFAULT_PARAMS = (-0.01, 0.01)
# What to read after an error.
HELP = "see docs/own-study.md"


@dataclass(frozen=True)
class Step:
    """One change to the step ``parent``; the step without a parent is the study's baseline.

    ``set`` maps the changed symbols to their values. ``params`` declares the change of the parameter
    count against the parent, as fractions (lowest, highest). The default is at most 1 % either way.
    """

    slug: str
    title: str
    parent: str = ""
    set: Mapping[str, SymbolValue] = field(default_factory=dict)
    params: tuple[float, float] = DEFAULT_PARAMS
    # In a user's file: file:line of the step, as "", and of each symbol.
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Study:
    """An ordered list of steps; a step's index in the list is its number.

    ``seeds`` are trained unless the configuration or the command line has others. ``is_own``
    distinguishes the study of a user's file. A study that is not to be judged has no verdicts.

    Raises ConfigError if a slug is duplicate, malformed or the name of a run that plans add, a parent
    does not precede its child, the baseline sets symbols, or any other step sets none.
    """

    name: str
    steps: Sequence[Step]
    seeds: tuple[int, ...] = ()
    is_own: bool = False
    judge: bool = True
    # Of losses and differences; "" for VERDICT_UNIT.
    unit: str = ""

    def __post_init__(self) -> None:
        problems = [
            Problem(what, _located(step, f"step {self.name}/{step.slug}"), HELP, code=code)
            for step, what, code in self._defects()
        ]
        if problems:
            raise ConfigError(*problems)

    @property
    def baseline(self) -> Step:
        """Return the step that all other steps are compared with."""
        return self.steps[0]

    def number(self, step: Step) -> int:
        """Return the index of ``step`` in the study, from 0."""
        return [s.slug for s in self.steps].index(step.slug)

    def label(self, step: Step) -> str:
        """Return the step's name in reports: ``study/number-slug``."""
        return f"{self.name}/{self.number(step):02d}-{step.slug}"

    def where(self, step: Step, symbol: str = "") -> str:
        """Return the location of ``step`` in errors, or of a symbol that it sets."""
        return _located(step, f"step {self.label(step)}", symbol)

    def step(self, slug: str) -> Step:
        """Return the step called ``slug``, which must exist."""
        return next(s for s in self.steps if s.slug == slug)

    def parent(self, step: Step) -> Step | None:
        """Return the parent of ``step``; None for the baseline."""
        return self.step(step.parent) if step.parent else None

    def lineage(self, step: Step) -> list[Step]:
        """Return the steps from the baseline down to ``step``, parents before children."""
        steps = [step]
        while (parent := self.parent(steps[0])) is not None:
            steps.insert(0, parent)
        return steps

    def select(self, text: str) -> list[Step]:
        """Return the steps selected by ``text``, in the study's order.

        ``text`` is a comma-separated list of ``all``, numbers, ranges such as ``0-3``, slugs, and
        patterns such as ``ra-*``. Raises ConfigError with every item that matches no step, each with
        the nearest slugs.
        """
        chosen: set[str] = set()
        problems = []
        for word in text.replace(",", " ").split():
            matches = self._matching(word)
            chosen.update(step.slug for step in matches)
            if not matches:
                what = self._no_such_step(word)
                advice = "type: make plan, to list the steps"
                problems.append(Problem(what, "STEPS", advice, code="usage.unknown-step"))
        if problems:
            raise ConfigError(*problems)
        if not chosen:
            what, advice = "no step selected", "type: make STEPS=all"
            raise ConfigError(Problem(what, "STEPS", advice, code="usage.missing-argument"))
        return [step for step in self.steps if step.slug in chosen]

    def _matching(self, word: str) -> list[Step]:
        if word == "all":
            return list(self.steps)
        match = _RANGE.fullmatch(word)
        if match:
            first = int(match[1])
            last = int(match[2] or first)
            return list(self.steps[first : last + 1]) if last < len(self.steps) else []
        return [step for step in self.steps if fnmatch.fnmatchcase(step.slug, word)]

    def _no_such_step(self, word: str) -> str:
        near = nearest(word, [step.slug for step in self.steps])
        last = len(self.steps) - 1
        return f"unknown step {word!r} of {self.name} (expected 0-{last} or a slug{near})"

    def _defects(self) -> list[tuple[Step, str, str]]:
        """Return (step, problem, error code) of every defect."""
        defects = []
        reserved = [f"{self.steps[0].slug}-{end}" for end in (AA, AGAIN)]
        seen: set[str] = set()
        for step in self.steps:
            if not SLUG.fullmatch(step.slug):
                what = "invalid slug (expected lower-case words joined by hyphens)"
                defects.append((step, what, "study.invalid-slug"))
            if step.slug in reserved:
                what = f"reserved name (plans add runs named {' and '.join(reserved)})"
                defects.append((step, what, "study.reserved-name"))
            if step.slug in seen:
                defects.append((step, "duplicate slug", "study.duplicate-step"))
            if seen and step.parent not in seen:
                near = nearest(step.parent, seen)
                what = f"parent {step.parent!r} is not the name of an earlier step{near}"
                defects.append((step, what, "study.unknown-parent"))
            if seen and not step.set:
                defects.append((step, "the step sets no symbol", "study.empty-step"))
            if not seen and step.set:
                what = "the baseline must not set symbols"
                defects.append((step, what, "study.baseline-changes"))
            seen.add(step.slug)
        return defects


def _located(step: Step, label: str, symbol: str = "") -> str:
    """Return ``label`` behind the step's line in the user's file, if it has one."""
    place = step.places.get(symbol, step.places.get("", ""))
    return f"{place}: {label}" if place else label
