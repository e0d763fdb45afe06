"""Checks of assignments against the Kconfig tree, with a hint for each failure.

Names, types and duplicates are checked before a layer is applied. Dependencies, ranges and choices
are checked after the layer is applied, because they depend on the resulting values.
"""

import difflib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kconfiglib import BOOL, INT, STRING, Choice, Kconfig, Symbol

from lib.errors import Problem
from lib.kconfig.expressions import range_text, selectors, unmet
from lib.kconfig.layers import Assignment, Layer

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


class Failure(NamedTuple):
    """Reason that an assignment fails, with its error code."""

    what: str
    code: str


@dataclass(frozen=True)
class Finding:
    """Failed assignment. ``stale`` marks a line of ``.config`` that the current tree outdates."""

    assignment: Assignment
    problem: Problem
    stale: bool = False


def has_prompt(item: Symbol | Choice) -> bool:
    """Return whether a user can set ``item``; an item without a prompt is derived from others."""
    return any(node.prompt for node in item.nodes)


def holds(symbol: Symbol, assignment: Assignment) -> bool:
    """Return whether the symbol currently has the assigned value."""
    return bool(symbol.str_value == assignment.value)


def definition(item: Symbol | Choice) -> str:
    """Return ``file:line`` of the definition that carries the prompt."""
    node = next((n for n in item.nodes if n.prompt), item.nodes[0])
    return f"{node.filename}:{node.linenr}"


def check_form(kconf: Kconfig, layer: Layer) -> tuple[list[Assignment], list[Finding]]:
    """Split a layer into well-formed assignments and findings about the other assignments."""
    valid: list[Assignment] = []
    findings: list[Finding] = []
    first: dict[str, Assignment] = {}
    chosen: dict[Choice, Assignment] = {}
    for assignment in layer.assignments:
        symbol = kconf.syms.get(assignment.name)
        exists = symbol is not None and bool(symbol.nodes)
        failure: Failure | None
        if not exists:
            failure = _unknown(kconf, assignment.name)
        elif not has_prompt(symbol) and layer.label != "config":
            what = f"is derived (no prompt, {definition(symbol)}) and cannot be set"
            failure = Failure(what, "config.not-settable")
        else:
            failure = (
                _wrong_type(symbol, assignment)
                or _duplicate(first, assignment)
                or _second_member(chosen, symbol, assignment)
            )
        if failure:
            findings.append(_finding(layer, assignment, failure, stale=not exists))
        else:
            valid.append(assignment)
    return valid, findings


def check_effect(
    kconf: Kconfig, layer: Layer, assignments: Sequence[Assignment]
) -> Iterator[Finding]:
    """Yield a finding for each just applied assignment without effect."""
    for assignment in assignments:
        symbol = kconf.syms[assignment.name]
        if not holds(symbol, assignment):
            stale = not symbol.visibility
            yield _finding(layer, assignment, explain_failure(symbol, assignment), stale)


def explain_failure(symbol: Symbol, assignment: Assignment) -> Failure:
    """Return why an applied assignment has no effect."""
    if not has_prompt(symbol):
        what = f"is derived (no prompt, {definition(symbol)}), current value {symbol.str_value}"
        return Failure(what, "config.not-settable")
    if not symbol.visibility:
        return Failure(unmet(symbol), "config.unmet-dependency")
    if symbol.choice:
        what = f"selected member of the choice {symbol.choice.name}; set another member to y"
        return Failure(what, "config.conflict")
    if symbol.orig_type is INT and range_text(symbol):
        return Failure(f"out of range {range_text(symbol)}", "config.out-of-range")
    forced = selectors(symbol)
    if forced:
        return Failure(f"must be y, selected by {' and '.join(forced)}", "config.conflict")
    return Failure(f"has no effect, the value is {symbol.str_value!r}", "config.no-effect")


def _finding(layer: Layer, assignment: Assignment, failure: Failure, stale: bool) -> Finding:
    what = f"{assignment.name}={assignment.value}: {failure.what}"
    problem = Problem(what, assignment.where, code=failure.code)
    return Finding(assignment, problem, stale and layer.label == "config")


def _unknown(kconf: Kconfig, name: str) -> Failure:
    if name in kconf.named_choices:
        members = ", ".join(member.name for member in kconf.named_choices[name].syms)
        what = f"is a choice; set one of its members to y: {members}"
        return Failure(what, "config.not-settable")
    names = [s.name for s in kconf.unique_defined_syms] + list(kconf.named_choices)
    near = difflib.get_close_matches(name.upper(), names, n=3)
    what = "no such symbol" + (f"; nearest: {', '.join(near)}" if near else "")
    return Failure(what, "config.unknown-symbol")


def _wrong_type(symbol: Symbol, assignment: Assignment) -> Failure | None:
    value, quoted = assignment.value, assignment.quoted
    if symbol.orig_type is STRING:
        if quoted is False:
            what = f'a string requires quotes: CONFIG_{symbol.name}="{value}"'
            return Failure(what, "config.wrong-type")
        return _unprintable(value)
    kind, form = ("bool", "y or n") if symbol.orig_type is BOOL else ("int", "an integer")
    fits = value in ("y", "n") if symbol.orig_type is BOOL else _INTEGER.fullmatch(value)
    if not fits:
        return Failure(f"wrong type, {symbol.name} is {kind}: {form}", "config.wrong-type")
    if quoted:
        what = f"wrong type, {symbol.name} is {kind}: remove the quotes"
        return Failure(what, "config.wrong-type")
    return None


def _unprintable(value: str) -> Failure | None:
    """Reject line separators, control characters and non-UTF-8 bytes: .config is line-based."""
    for character in value:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character != "\t":
            what = f"line break, control character or non-UTF-8 byte {character!r} in a string"
            return Failure(what, "config.invalid-character")
    return None


def _duplicate(first: dict[str, Assignment], assignment: Assignment) -> Failure | None:
    earlier = first.setdefault(assignment.name, assignment)
    if earlier.value == assignment.value:
        return None
    what = f"duplicate with another value: {earlier.value} at {earlier.where}"
    return Failure(what, "config.duplicate")


def _second_member(
    chosen: dict[Choice, Assignment], symbol: Symbol, assignment: Assignment
) -> Failure | None:
    if not symbol.choice or assignment.value != "y":
        return None
    earlier = chosen.setdefault(symbol.choice, assignment)
    if earlier.name == assignment.name:
        return None
    what = f"second member of the choice {symbol.choice.name}: {earlier.name}=y at {earlier.where}"
    return Failure(what, "config.conflict")
