"""Text for Kconfig conditions and ranges, with the current values of their symbols."""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import kconfiglib
from kconfiglib import AND, BOOL, INT, NOT, STRING, Choice, Kconfig, Symbol

from lib.config.layers import Assignment, ConfigLayer
from lib.errors import Problem, nearest
from lib.gone import gone, is_without_effect

# What to type if the name of a symbol is unknown.
FIND_SYMBOL = "type: make menuconfig, where / finds symbols"
# A symbol, a choice, or kconfiglib's tuple of operator and operands.
Expression = Any


def requirements(item: Symbol | Choice) -> list[Expression]:
    """Return the conditions for setting ``item``; a choice is replaced by its conditions."""
    conditions = [node.prompt[1] for node in item.nodes if node.prompt]
    met = [condition for condition in conditions if kconfiglib.expr_value(condition)]
    clauses: list[Expression] = []
    for clause in kconfiglib.split_expr((met or conditions)[0], AND):
        if isinstance(clause, Choice):
            clauses += requirements(clause)
        elif clause is not item.kconfig.y:
            clauses.append(clause)
    return list(dict.fromkeys(clauses))


def unmet_requirements_text(item: Symbol | Choice) -> str:
    """Return why ``item`` cannot be set, such as ``needs LATENT=y (currently n)``."""
    false = (c for c in requirements(item) if not kconfiglib.expr_value(c))
    return "needs " + "; ".join(f"{condition_text(c)} ({_why_false(c)})" for c in false)


def condition_text(clause: Expression) -> str:
    """Return the text of a required condition: ``A=y``, ``A=n``, ``N > 1`` or ``A || B``."""
    symbol = _operand(clause)
    if symbol is None:
        return str(kconfiglib.expr_str(clause))
    return f"{symbol.name}={'y' if clause is symbol else 'n'}"


def current_values(clause: Expression) -> dict[str, str]:
    """Return the current values of the symbols in a clause, by name."""
    items = [item for item in kconfiglib.expr_items(clause) if item.nodes]
    return {item.name: item.str_value for item in sorted(items, key=lambda item: item.name)}


def _operand(clause: Expression) -> Symbol | None:
    """Return the symbol A of the clauses ``A`` and ``!A``, None for any other clause."""
    inner = clause[1] if isinstance(clause, tuple) and clause[0] is NOT else clause
    return inner if isinstance(inner, Symbol) and not inner.is_constant else None


def _why_false(clause: Expression) -> str:
    symbol = _operand(clause)
    if symbol is not None:
        return f"currently {symbol.str_value}"
    values = ", ".join(f"{name}={value}" for name, value in current_values(clause).items())
    return f"currently {values}" if values else "never true"


def range_text(symbol: Symbol) -> str:
    """Return the active range, bounds that are symbols with name and value; "" without a range."""
    for low, high, when in symbol.ranges:
        if kconfiglib.expr_value(when):
            return f"{_bound(low)} to {_bound(high)}"
    return ""


def _bound(bound: Symbol) -> str:
    return f"{bound.name} ({bound.str_value})" if bound.nodes else bound.name


def selecting_symbols(symbol: Symbol) -> list[str]:
    """Return the names of the symbols that currently force ``symbol`` to y."""
    causes = kconfiglib.split_expr(symbol.rev_dep, kconfiglib.OR)
    active = (cause for cause in causes if kconfiglib.expr_value(cause))
    return [kconfiglib.split_expr(cause, AND)[0].name for cause in active]


# Checks of assignments against the Kconfig tree, with a hint for each failure.
#
# Names, types and duplicates are checked before a layer is applied. Dependencies, ranges and choices
# are checked after the layer is applied, because they depend on the resulting values.


_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


# Why an assignment fails, and the error code.
FailureReason = tuple[str, str]


@dataclass(frozen=True)
class AssignmentFailure:
    """Failed assignment. ``stale`` marks a line of ``.config`` that the current tree outdates."""

    assignment: Assignment
    problem: Problem
    stale: bool = False


def is_settable(item: Symbol | Choice) -> bool:
    """Return whether a user can set ``item``; an item without a prompt is derived from others."""
    return any(node.prompt for node in item.nodes)


def prompt_node(item: Symbol | Choice) -> Any:
    """Return the definition that carries the prompt, or the first one."""
    return next((node for node in item.nodes if node.prompt), item.nodes[0])


def definition_location(item: Symbol | Choice) -> str:
    """Return ``file:line`` of the definition that carries the prompt."""
    node = prompt_node(item)
    return f"{node.filename}:{node.linenr}"


def validate_syntax(
    kconf: Kconfig, layer: ConfigLayer
) -> tuple[list[Assignment], list[AssignmentFailure]]:
    """Split a layer into well-formed assignments and findings about the other assignments."""
    valid: list[Assignment] = []
    findings: list[AssignmentFailure] = []
    first: dict[str, Assignment] = {}
    chosen: dict[Choice, Assignment] = {}
    for assignment in layer.assignments:
        symbol = kconf.syms.get(assignment.name)
        exists = symbol is not None and bool(symbol.nodes)
        failure: FailureReason | None
        if not exists:
            failure = _unknown(kconf, assignment)
        elif not is_settable(symbol) and not layer.is_full:
            what = f"is derived (no prompt, {definition_location(symbol)}) and cannot be set"
            failure = what, "config.not-settable"
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


def validate_effect(
    kconf: Kconfig, layer: ConfigLayer, assignments: Sequence[Assignment]
) -> Iterator[AssignmentFailure]:
    """Yield a finding for each just applied assignment without effect."""
    for assignment in assignments:
        symbol = kconf.syms[assignment.name]
        # The constant of an unavailable integer is 0, although it has no value.
        is_absent = layer.label == "constants" and not symbol.str_value and assignment.value == "0"
        if not is_absent and symbol.str_value != assignment.value:
            stale = not symbol.visibility
            yield _finding(layer, assignment, failure_reason(symbol, assignment), stale)


def failure_reason(symbol: Symbol, assignment: Assignment) -> FailureReason:
    """Return why an applied assignment has no effect."""
    if not is_settable(symbol):
        what = f"is derived (no prompt, {definition_location(symbol)}), current value {symbol.str_value}"
        return what, "config.not-settable"
    if not symbol.visibility:
        return unmet_requirements_text(symbol), "config.unmet-dependency"
    if symbol.choice:
        what = f"selected member of the choice {symbol.choice.name}; set another member to y"
        return what, "config.conflict"
    if symbol.orig_type is INT and range_text(symbol):
        what = f"out of range (expected {range_text(symbol)}, got {assignment.value})"
        return what, "config.out-of-range"
    forced = selecting_symbols(symbol)
    if forced:
        return f"must be y, selected by {' and '.join(forced)}", "config.conflict"
    return f"has no effect, the value is {symbol.str_value!r}", "config.no-effect"


def _finding(
    layer: ConfigLayer, assignment: Assignment, failure: FailureReason, stale: bool
) -> AssignmentFailure:
    what, code = failure
    stale = stale and layer.is_full
    advice = f"type: make why SYM={assignment.name}"
    if stale:
        advice = "type: make olddefconfig, which drops lines that no longer apply"
    elif code in ("config.unknown-symbol", "config.gone"):
        advice = FIND_SYMBOL
    what = f"{assignment.name}={assignment.value}: {what}"
    problem = Problem(what, assignment.where, advice, code=code)
    return AssignmentFailure(assignment, problem, stale)


def _unknown(kconf: Kconfig, assignment: Assignment) -> FailureReason:
    name = assignment.name
    if name in kconf.named_choices:
        members = ", ".join(member.name for member in kconf.named_choices[name].syms)
        return f"is a choice; set one of its members to y: {members}", "config.not-settable"
    if is_without_effect(name, assignment.value):
        return f"{gone('symbol', name)}; without effect on a run at this value", GONE_OFF
    return unknown_symbol(
        name, [s.name for s in kconf.unique_defined_syms] + list(kconf.named_choices)
    )


# Code of a line whose symbol is gone and stands at the value that runs have without it.
GONE_OFF = "config.gone-off"


def unknown_symbol(name: str, known: Iterable[str]) -> FailureReason:
    """Return what replaces a symbol that is gone, or the nearest of the ``known`` names."""
    if answer := gone("symbol", name):
        return answer, "config.gone"
    return f"no such symbol{nearest(name, known)}", "config.unknown-symbol"


def _wrong_type(symbol: Symbol, assignment: Assignment) -> FailureReason | None:
    value, quoted = assignment.value, assignment.quoted
    if symbol.orig_type is STRING:
        if quoted is False:
            what = f'a string requires quotes: CONFIG_{symbol.name}="{value}"'
            return what, "config.wrong-type"
        return _unprintable(value)
    form = "y or n" if symbol.orig_type is BOOL else "an integer"
    fits = value in ("y", "n") if symbol.orig_type is BOOL else _INTEGER.fullmatch(value)
    if not fits or quoted:
        form += ", without quotes" * bool(quoted)
        return f"wrong type (expected {form}, got {value!r})", "config.wrong-type"
    return None


def _unprintable(value: str) -> FailureReason | None:
    """Reject line separators, control characters and non-UTF-8 bytes: .config is line-based."""
    for character in value:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character != "\t":
            what = f"line break, control character or non-UTF-8 byte {character!r} in a string"
            return what, "config.invalid-character"
    return None


def _duplicate(first: dict[str, Assignment], assignment: Assignment) -> FailureReason | None:
    earlier = first.setdefault(assignment.name, assignment)
    if earlier.value == assignment.value:
        return None
    what = f"duplicate with another value: {earlier.value} at {earlier.where}"
    return what, "config.duplicate"


def _second_member(
    chosen: dict[Choice, Assignment], symbol: Symbol, assignment: Assignment
) -> FailureReason | None:
    if not symbol.choice or assignment.value != "y":
        return None
    earlier = chosen.setdefault(symbol.choice, assignment)
    if earlier.name == assignment.name:
        return None
    what = f"second member of the choice {symbol.choice.name}: {earlier.name}=y at {earlier.where}"
    return what, "config.conflict"
