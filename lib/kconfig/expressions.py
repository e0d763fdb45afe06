"""Text for Kconfig conditions and ranges, with the current values of their symbols."""

from typing import Any, TypeAlias

import kconfiglib
from kconfiglib import AND, NOT, Choice, Symbol

# A symbol, a choice, or kconfiglib's tuple of operator and operands.
Expression = Any
Item: TypeAlias = Symbol | Choice


def requirements(item: Item) -> list[Expression]:
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


def unmet(item: Item) -> str:
    """Return why ``item`` cannot be set, such as ``needs LATENT=y (currently n)``."""
    false = (c for c in requirements(item) if not kconfiglib.expr_value(c))
    return "needs " + "; ".join(f"{condition(c)} ({_why_false(c)})" for c in false)


def condition(clause: Expression) -> str:
    """Return the text of a required condition: ``A=y``, ``A=n``, ``N > 1`` or ``A || B``."""
    symbol = _operand(clause)
    if symbol is None:
        return str(kconfiglib.expr_str(clause))
    return f"{symbol.name}={'y' if clause is symbol else 'n'}"


def current(clause: Expression) -> dict[str, str]:
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
    values = ", ".join(f"{name}={value}" for name, value in current(clause).items())
    return f"currently {values}" if values else "never true"


def range_text(symbol: Symbol) -> str:
    """Return the active range, bounds that are symbols with name and value; "" without a range."""
    for low, high, when in symbol.ranges:
        if kconfiglib.expr_value(when):
            return f"{_bound(low)} to {_bound(high)}"
    return ""


def _bound(bound: Symbol) -> str:
    return f"{bound.name} ({bound.str_value})" if bound.nodes else bound.name


def selectors(symbol: Symbol) -> list[str]:
    """Return the names of the symbols that currently force ``symbol`` to y."""
    causes = kconfiglib.split_expr(symbol.rev_dep, kconfiglib.OR)
    active = (cause for cause in causes if kconfiglib.expr_value(cause))
    return [kconfiglib.split_expr(cause, AND)[0].name for cause in active]
