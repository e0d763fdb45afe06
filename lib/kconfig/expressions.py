"""Puts Kconfig's conditions and ranges into words, with the values they have now."""

from typing import Any, TypeAlias

import kconfiglib
from kconfiglib import AND, NOT, Choice, Symbol

# A symbol, a choice, or kconfiglib's tuple of operator and operands.
Expression = Any
Item: TypeAlias = Symbol | Choice


def requirements(item: Item) -> list[Expression]:
    """The conditions that must all hold for ``item`` to be set; a choice stands for its own."""
    conditions = [node.prompt[1] for node in item.nodes if node.prompt]
    met = [condition for condition in conditions if kconfiglib.expr_value(condition)]
    clauses: list[Expression] = []
    for clause in kconfiglib.split_expr((met or conditions)[0], AND):
        if isinstance(clause, Choice):
            clauses += requirements(clause)
        elif clause is not item.kconfig.y:
            clauses.append(clause)
    return list(dict.fromkeys(clauses))


def unmet(item: Item) -> str:
    """Why ``item`` cannot be set, such as ``needs LATENT=y, which is n``."""
    false = (c for c in requirements(item) if not kconfiglib.expr_value(c))
    return "needs " + "; ".join(f"{condition(c)}, {_why_false(c)}" for c in false)


def condition(clause: Expression) -> str:
    """What a clause asks for: ``A=y``, ``A=n``, ``N > 1`` or ``A || B``."""
    symbol = _operand(clause)
    if symbol is None:
        return str(kconfiglib.expr_str(clause))
    return f"{symbol.name}={'y' if clause is symbol else 'n'}"


def current(clause: Expression) -> dict[str, str]:
    """The values that decide a clause now, by name."""
    items = [item for item in kconfiglib.expr_items(clause) if item.nodes]
    return {item.name: item.str_value for item in sorted(items, key=lambda item: item.name)}


def _operand(clause: Expression) -> Symbol | None:
    """The symbol A of the clauses ``A`` and ``!A``; None for any other."""
    inner = clause[1] if isinstance(clause, tuple) and clause[0] is NOT else clause
    return inner if isinstance(inner, Symbol) and not inner.is_constant else None


def _why_false(clause: Expression) -> str:
    symbol = _operand(clause)
    if symbol is not None:
        return f"which is {symbol.str_value}"
    values = " and ".join(f"{name} is {value}" for name, value in current(clause).items())
    return f"where {values}" if values else "which nothing can meet"


def range_text(symbol: Symbol) -> str:
    """The range in words, with the name of a bound that is itself a symbol; "" without one."""
    for low, high, when in symbol.ranges:
        if kconfiglib.expr_value(when):
            return f"{_bound(low)} to {_bound(high)}"
    return ""


def _bound(bound: Symbol) -> str:
    return f"{bound.name} ({bound.str_value})" if bound.nodes else bound.name


def selectors(symbol: Symbol) -> list[str]:
    """The names of the symbols that force ``symbol`` to y now."""
    causes = kconfiglib.split_expr(symbol.rev_dep, kconfiglib.OR)
    active = (cause for cause in causes if kconfiglib.expr_value(cause))
    return [kconfiglib.split_expr(cause, AND)[0].name for cause in active]
