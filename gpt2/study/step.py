"""Steps of an ablation study: what a step changes, its title, and the selection of steps."""

import fnmatch
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lib.config.field import SymbolValue
from lib.config.layers import to_kconfig_text
from lib.errors import ConfigError, Problem, nearest

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
DEFAULT_PARAMS = (-0.01, 0.01)
_WORDS = dict(
    enumerate(["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])
)
# How a field of a title shows a value: {SYMBOL}, {SYMBOL:%} and {SYMBOL:word}.
_FORMS: Mapping[str, Callable[[SymbolValue], str]] = {
    "": to_kconfig_text,
    "%": lambda value: f"{100 * float(to_kconfig_text(value)):g} %",
    "word": lambda value: _WORDS[int(to_kconfig_text(value))],
}
_TITLE_HELP = (
    "type: {SYMBOL} for the value of a setting, {SYMBOL:%} for a share, {SYMBOL:word} for a number "
    "in words, {{ for a brace"
)


@dataclass(frozen=True)
class Step:
    """One change to the step ``parent``; the step without a parent is the study's baseline.

    ``set`` maps the changed symbols to their values. ``title`` may have fields for the values of the
    step's configuration. ``params`` declares the change of the parameter count against the parent, as
    fractions (lowest, highest). The default is at most 1 % either way.
    """

    slug: str
    title: str
    parent: str = ""
    set: Mapping[str, SymbolValue] = field(default_factory=dict)
    params: tuple[float, float] = DEFAULT_PARAMS
    # In a user's file: file:line of the step, as "", and of "title" and each symbol.
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Study:
    """An ordered list of steps; a step's index in the list is its number.

    A parent precedes its children, and the first step is the baseline. ``seeds`` are trained unless
    the configuration or the command line has others. A study that is not to be judged has no verdicts.
    """

    name: str
    steps: Sequence[Step]
    seeds: tuple[int, ...] = ()
    judge: bool = True
    # Of losses and differences; "" for VERDICT_UNIT.
    unit: str = ""

    def number(self, step: Step) -> int:
        """Return the index of ``step`` in the study, from 0."""
        return [s.slug for s in self.steps].index(step.slug)

    def label(self, step: Step) -> str:
        """Return the step's name in reports: ``study/number-slug``."""
        return f"{self.name}/{self.number(step):02d}-{step.slug}"

    def where(self, step: Step, key: str = "") -> str:
        """Return the location of ``step`` in errors, or of a symbol that it sets or its "title"."""
        place = step.places.get(key, step.places.get("", ""))
        return f"{place}: step {self.label(step)}" if place else f"step {self.label(step)}"

    def step(self, slug: str) -> Step:
        """Return the step called ``slug``, which must exist."""
        return next(s for s in self.steps if s.slug == slug)

    def lineage(self, step: Step) -> list[Step]:
        """Return the steps from the baseline down to ``step``, parents before children."""
        return [*(self.lineage(self.step(step.parent)) if step.parent else ()), step]

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
                near = nearest(word, [step.slug for step in self.steps])
                expected = f"expected 0-{len(self.steps) - 1} or a name{near}"
                what = f"unknown step {word!r} of {self.name} ({expected})"
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


def filled_title(title: str, values: Mapping[str, SymbolValue]) -> str:
    """Return the title with the values of its fields; ``values`` are the settings that apply.

    Raises ConfigError without a location if the braces are not those of fields, a field is not among
    the settings, or its value is not the number that its form requires.
    """
    try:
        parts = list(string.Formatter().parse(title))
    except ValueError as error:
        raise _wrong_title(f"malformed field: {error}") from None
    filled = ""
    for text, name, form, conversion in parts:
        filled += text
        if name is None:
            continue
        show = _FORMS.get(form or "")
        if conversion or show is None:
            raise _wrong_title(f"unknown format of {{{name}}}")
        if name not in values:
            expected = f"expected a setting that applies to the step{nearest(name, values)}"
            raise _wrong_title(f"unknown field {{{name}}} ({expected})")
        try:
            filled += show(values[name])
        except (ValueError, KeyError):
            raise _wrong_title(f"{{{name}:{form}}}: not a number: {values[name]!r}") from None
    return filled


def _wrong_title(what: str) -> ConfigError:
    return ConfigError(Problem(f"title: {what}", next=_TITLE_HELP, code="study.invalid-title"))
