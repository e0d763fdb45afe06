"""Registries of components: the options classes that a configuration selects from, by name.

An options class imports no torch, so the configuration, the plan and the report can bind it. Tables
of the packages with modules map it to the component itself.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from lib.config.field import SymbolValue, from_symbols, missing_symbol
from lib.errors import ConfigError, Problem


class ComponentOptions(Protocol):
    """Options of a component of any kind."""

    # Name in the registry and, in capitals, in Kconfig symbols.
    name: ClassVar[str]


OptionsT = TypeVar("OptionsT", bound=ComponentOptions)


class Registry(Generic[OptionsT]):
    """Registry of the components of one kind: name → options class.

    With ``choice``, the Kconfig choice of that name selects exactly one component. Without
    ``choice``, each component has a bool symbol (its name in capitals), and any number of
    components can be selected.
    """

    def __init__(self, kind: str, *options: type[OptionsT], choice: str = "") -> None:
        self.kind = kind
        self.choice = choice
        self._options = {cls.name: cls for cls in options}
        assert len(self._options) == len(options), f"duplicate name of a {kind}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def symbols(self) -> list[str]:
        """Return the Kconfig names that select components: the choice, or one bool for each."""
        return [self.choice] if self.choice else [name.upper() for name in self]

    def selected(self, values: Mapping[str, SymbolValue]) -> list[str]:
        """Return the names that a configuration selects, in registry order.

        Raises ConfigError if a symbol is missing, or if the choice names no component.
        """
        if missing := [symbol for symbol in self.symbols() if symbol not in values]:
            raise ConfigError(*(missing_symbol(symbol) for symbol in missing))
        if not self.choice:
            return [name for name in self if values[name.upper()]]
        name = str(values[self.choice])
        if name not in self._options:
            what = f"{self.choice}: expected {', '.join(self)}, got {name!r}"
            raise ConfigError(Problem(what, code="config.wrong-type"))
        return [name]

    def bind(self, values: Mapping[str, SymbolValue]) -> tuple[OptionsT, ...]:
        """Return the options of every selected component, filled from the configuration.

        Raises ConfigError if a symbol is missing or invalid.
        """
        return tuple(from_symbols(self.options(name), values) for name in self.selected(values))

    def options(self, name: str) -> type[OptionsT]:
        return self._options[name]
