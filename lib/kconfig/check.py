"""Whether assignments fit the Kconfig tree, and whether they took; each rule says what to do.

Form is checked before a layer is applied (names, types, duplicates), effect after it (dependencies,
ranges, choices), because only then are the values known that dependencies look at.
"""

import difflib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kconfiglib import BOOL, INT, STRING, Choice, Kconfig, Symbol

from lib.errors import Problem
from lib.kconfig.expressions import range_text, selectors, unmet
from lib.kconfig.layers import Assignment, Layer

_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]*")


@dataclass(frozen=True)
class Finding:
    """An assignment that fails; ``stale`` if a ``.config`` comes to hold it as the tree changes."""

    assignment: Assignment
    problem: Problem
    stale: bool = False


def has_prompt(item: Symbol | Choice) -> bool:
    """Whether a user can set ``item``; without a prompt it is derived from others."""
    return any(node.prompt for node in item.nodes)


def holds(symbol: Symbol, assignment: Assignment) -> bool:
    """Whether the symbol has the assigned value now."""
    return bool(symbol.str_value == assignment.value)


def definition(item: Symbol | Choice) -> str:
    """``file:line`` of the definition that carries the prompt."""
    node = next((n for n in item.nodes if n.prompt), item.nodes[0])
    return f"{node.filename}:{node.linenr}"


def check_form(kconf: Kconfig, layer: Layer) -> tuple[list[Assignment], list[Finding]]:
    """Split a layer into assignments that can be tried and findings on the others."""
    good: list[Assignment] = []
    findings: list[Finding] = []
    first: dict[str, Assignment] = {}
    chosen: dict[Choice, Assignment] = {}
    for assignment in layer.assignments:
        symbol = kconf.syms.get(assignment.name)
        known = symbol is not None and bool(symbol.nodes)
        if not known:
            what = _unknown(kconf, assignment.name)
        elif not has_prompt(symbol) and layer.label != "config":
            what = f"is derived (no prompt, {definition(symbol)}) and cannot be set"
        else:
            what = (
                _wrong_type(symbol, assignment)
                or _duplicate(first, assignment)
                or _second_member(chosen, symbol, assignment)
            )
        if what:
            findings.append(_finding(layer, assignment, what, stale=not known))
        else:
            good.append(assignment)
    return good, findings


def check_effect(
    kconf: Kconfig, layer: Layer, assignments: Sequence[Assignment]
) -> Iterator[Finding]:
    """The assignments, just applied, that did not take."""
    for assignment in assignments:
        symbol = kconf.syms[assignment.name]
        if not holds(symbol, assignment):
            stale = not symbol.visibility
            yield _finding(layer, assignment, explain_failure(symbol, assignment), stale)


def explain_failure(symbol: Symbol, assignment: Assignment) -> str:
    """Why an applied assignment has no effect."""
    if not has_prompt(symbol):
        return f"is derived (no prompt, {definition(symbol)}) and is {symbol.str_value} here"
    if not symbol.visibility:
        return unmet(symbol)
    if symbol.choice:
        return f"is selected in the choice {symbol.choice.name}; set another member to y instead"
    if symbol.orig_type is INT and range_text(symbol):
        return f"out of range {range_text(symbol)}"
    forced = selectors(symbol)
    if forced:
        return f"is y because {' and '.join(forced)} selects it"
    return f"did not take, the value is {symbol.str_value!r}"


def _finding(layer: Layer, assignment: Assignment, what: str, stale: bool) -> Finding:
    problem = Problem(f"{assignment.name}={assignment.value}: {what}", assignment.where)
    return Finding(assignment, problem, stale and layer.label == "config")


def _unknown(kconf: Kconfig, name: str) -> str:
    if name in kconf.named_choices:
        members = ", ".join(member.name for member in kconf.named_choices[name].syms)
        return f"is a choice; set one of its members to y: {members}"
    names = [s.name for s in kconf.unique_defined_syms] + list(kconf.named_choices)
    near = difflib.get_close_matches(name.upper(), names, n=3)
    return "no such symbol" + (f"; nearest: {', '.join(near)}" if near else "")


def _wrong_type(symbol: Symbol, assignment: Assignment) -> str:
    value, quoted = assignment.value, assignment.quoted
    if symbol.orig_type is STRING:
        if quoted is False:
            return f'is a string and takes quotes: CONFIG_{symbol.name}="{value}"'
        return _unprintable(value)
    kind, form = ("bool", "y or n") if symbol.orig_type is BOOL else ("int", "a whole number")
    fits = value in ("y", "n") if symbol.orig_type is BOOL else _WHOLE_NUMBER.fullmatch(value)
    if not fits:
        return f"wrong type, {symbol.name} is {kind}: {form}"
    return f"wrong type, {symbol.name} is {kind} and takes no quotes" if quoted else ""


def _unprintable(value: str) -> str:
    """Refuse what would break a line-based file: line separators, control and non-UTF-8 bytes."""
    for character in value:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character != "\t":
            return f"holds {character!r}: no line breaks, control characters or non-UTF-8 bytes"
    return ""


def _duplicate(first: dict[str, Assignment], assignment: Assignment) -> str:
    earlier = first.setdefault(assignment.name, assignment)
    if earlier.value == assignment.value:
        return ""
    return f"duplicate with another value: {earlier.value} at {earlier.where}"


def _second_member(chosen: dict[Choice, Assignment], symbol: Symbol, assignment: Assignment) -> str:
    if not symbol.choice or assignment.value != "y":
        return ""
    earlier = chosen.setdefault(symbol.choice, assignment)
    if earlier.name == assignment.name:
        return ""
    return f"second member of the choice {symbol.choice.name}: {earlier.name}=y at {earlier.where}"
