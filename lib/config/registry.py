"""Registries of parts by name; a part's modules are imported only when used.

A part is a package named after its noun: ``options.py`` contains ``<Noun>Options`` and imports no
torch, ``module.py`` contains ``<Noun>`` or ``<Noun><Suffix>``. A registry maps names to packages;
the configuration, the plan and the report load the options class, the model loads the module class.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from lib.config.field import SymbolValue, from_symbols


class Registry:
    """Registry of one kind of part: name → package.

    With ``choice``, the Kconfig choice of that name selects exactly one part. Without ``choice``,
    each part has a bool symbol (its name in capitals), and any number of parts can be selected.
    """

    def __init__(
        self,
        kind: str,
        *,
        choice: str = "",
        suffix: str = "",
        parts: Mapping[str, tuple[str, str, str]],
    ) -> None:
        self.kind = kind
        self.choice = choice
        # Suffix of the module's class name if the noun alone is ambiguous: ``NonePruner``.
        self.suffix = suffix
        self._packages = dict(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packages)

    def symbols(self) -> list[str]:
        """Return the Kconfig names that select parts: the choice, or one bool per part."""
        return [self.choice] if self.choice else [name.upper() for name in self]

    def selected(self, values: Mapping[str, SymbolValue]) -> list[str]:
        """Return the names that a configuration selects, in registry order."""
        if self.choice:
            return [str(values[self.choice])]
        return [name for name in self if values[name.upper()]]

    def bind(self, values: Mapping[str, SymbolValue]) -> tuple:
        """Return the options of every selected part, filled from the configuration."""
        return tuple(from_symbols(self.options(name), values) for name in self.selected(values))

    def options(self, name: str) -> type:
        """Return the options class of ``name``; imports no torch. Raises ValueError if unknown."""
        return self._load(name, 0, "Options")

    def module(self, name: str) -> type:
        """Return the class that builds ``name``. Raises ValueError if unknown."""
        return self._load(name, 1, self.suffix)

    def reference(self, name: str) -> type:
        """Return the plain-Python reference class of ``name``. Raises ValueError if unknown."""
        return self._load(name, 2, "Reference")

    def _load(self, name: str, module: int, suffix: str) -> type:
        if name not in self._packages:
            names = ", ".join(self._packages)
            raise ValueError(f"unknown {self.kind} {name!r}; known: {names}")
        noun = "".join(word.capitalize() for word in name.split("_"))
        cls: type = vars(import_module(self._packages[name][module]))[noun + suffix]
        return cls
