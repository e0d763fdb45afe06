"""Step and Study: what is changed, on top of what, and how to name a part of the list."""

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lib.binding import Value
from lib.errors import ConfigError, Problem

_SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class Step:
    """One change to ``parent``; without a parent it is the study's baseline.

    ``set`` holds the symbols that change. ``params`` is the promise about model size: the change of
    the parameter count against the parent, as fractions (lowest, highest). A step that says nothing
    promises to stay within 1 %.
    """

    slug: str
    title: str
    parent: str = ""
    set: Mapping[str, Value] = field(default_factory=dict)
    params: tuple[float, float] = (-0.01, 0.01)


@dataclass(frozen=True)
class Study:
    """Steps in order; a step's place in the order is its number.

    ConfigError when slugs repeat or are malformed, a parent does not come first, or a step other
    than the baseline changes nothing.
    """

    name: str
    steps: Sequence[Step]

    def __post_init__(self) -> None:
        problems = [Problem(what, f"step {self.name}/{slug}") for slug, what in self._defects()]
        if problems:
            raise ConfigError(*problems)

    @property
    def baseline(self) -> Step:
        """The step that all others are compared with."""
        return self.steps[0]

    def number(self, step: Step) -> int:
        """The place of ``step`` in the order, from 0."""
        return [s.slug for s in self.steps].index(step.slug)

    def label(self, step: Step) -> str:
        """How output names a step: study, number and slug."""
        return f"{self.name}/{self.number(step):02d}-{step.slug}"

    def parent(self, step: Step) -> Step | None:
        """The step that ``step`` changes; None for the baseline."""
        return next((s for s in self.steps if s.slug == step.parent), None)

    def lineage(self, step: Step) -> list[Step]:
        """From the baseline down to ``step``, parent before child."""
        found = [step]
        while (parent := self.parent(found[0])) is not None:
            found.insert(0, parent)
        return found

    def select(self, text: str) -> list[Step]:
        """The steps that ``text`` names, in the study's order.

        Comma-separated: ``all``, a number, a range ``0-3``, a slug, or a pattern such as ``ra-*``.
        ConfigError lists all that name nothing, each with the nearest slugs.
        """
        chosen: set[str] = set()
        problems = []
        for word in text.replace(",", " ").split():
            found = self._named(word)
            chosen.update(step.slug for step in found)
            if not found:
                problems.append(Problem(self._no_such_step(word), "STEPS"))
        if problems:
            raise ConfigError(*problems)
        if not chosen:
            raise ConfigError(Problem("names no step", "STEPS", "type: make STEPS=all"))
        return [step for step in self.steps if step.slug in chosen]

    def _named(self, word: str) -> list[Step]:
        if word == "all":
            return list(self.steps)
        match = _RANGE.fullmatch(word)
        if match:
            first = int(match[1])
            last = int(match[2] or first)
            return list(self.steps[first : last + 1]) if last < len(self.steps) else []
        return [step for step in self.steps if fnmatch.fnmatchcase(step.slug, word)]

    def _no_such_step(self, word: str) -> str:
        near = difflib.get_close_matches(word, [s.slug for s in self.steps], n=3)
        known = f"0-{len(self.steps) - 1}" + (f"; nearest: {', '.join(near)}" if near else "")
        return f"{word!r} names no step of {self.name}; its numbers are {known}"

    def _defects(self) -> list[tuple[str, str]]:
        found = []
        seen: set[str] = set()
        for step in self.steps:
            if not _SLUG.fullmatch(step.slug):
                found.append((step.slug, "a slug is lower-case words joined by hyphens"))
            if step.slug in seen:
                found.append((step.slug, "another step has this slug"))
            if seen and step.parent not in seen:
                found.append((step.slug, f"its parent {step.parent!r} does not come before it"))
            if bool(step.set) is not bool(seen):
                what = "changes nothing" if seen else "the baseline changes nothing itself"
                found.append((step.slug, what))
            seen.add(step.slug)
        return found
