"""Small forms of configurations, for checks on a CPU: the same symbols with smaller numbers.

Each field bound to a symbol declares the rule of its small value, such as
``kconfig_field("SLIDING_WINDOW", small=scale_tokens)``; without a rule the value stays.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

SymbolValue = bool | int | str


@dataclass(frozen=True)
class SmallForm:
    """Sizes of a configuration and of its small form, from which rules compute values."""

    # Value of every symbol, in the configuration and in all configurations of the study that have
    # its context length.
    values: Mapping[str, SymbolValue]
    peers: Sequence[Mapping[str, SymbolValue]]
    full_context: int
    context: int
    full_width: int
    width: int
    heads: int

    @property
    def keeps_context(self) -> bool:
        """Return whether token counts keep their values."""
        return self.context == self.full_context

    def number(self, name: str) -> int:
        """Return the configured value of an integer symbol."""
        return _number(self.values, name)


# Computes the small value of the named symbol.
SmallRule = Callable[[SmallForm, str], SymbolValue]


def always(value: SymbolValue) -> SmallRule:
    """Return the rule of a fixed small value."""
    return lambda form, name: value


def at_most(limit: int) -> SmallRule:
    """Return the rule that limits a value."""
    return lambda form, name: min(form.number(name), limit)


def scale_width(low: int, times: int) -> SmallRule:
    """Return the rule of a width that shrinks with the model's: at least ``low``.

    The maximum is ``times`` the model's width. 0 selects a default and stays 0.
    """

    def scale(form: SmallForm, name: str) -> int:
        full = form.number(name)
        small = max(low, round(full * form.width / form.full_width)) if full else 0
        return min(small, times * form.width)

    return scale


def scale_tokens(form: SmallForm, name: str) -> int:
    """Return a token count that keeps its place in the context, and its order among the study's."""
    fulls = {_number(values, name) for values in (form.values, *form.peers)}
    return _small_positions(fulls, form.full_context, form.context)[form.number(name)]


def _small_positions(fulls: Iterable[int], context: int, small: int) -> dict[int, int]:
    """Map token counts to a small context; 0, 1, and the whole context keep their meaning.

    Other counts keep their position on a logarithmic scale, shifted up to stay distinct, and down
    at the end of the context. Counts beyond the available positions share the first.
    """
    positions = {full: min(full, small) for full in fulls if full <= 1 or full >= context}
    inner = sorted(set(fulls) - positions.keys())
    position = 1
    for full in inner:
        position = max(position + 1, round(small ** (math.log(full) / math.log(context))))
        positions[full] = position
    last = small
    for full in reversed(inner):
        last = positions[full] = max(2, min(last - 1, positions[full]))
    return positions


def _number(values: Mapping[str, SymbolValue], name: str) -> int:
    value = values[name]
    assert isinstance(value, int), (name, value)
    return value
