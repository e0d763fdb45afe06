"""Name → part, without importing what is not used.

A part lives in a package named after its noun: ``options.py`` holds ``<Noun>Options`` and imports no
torch, ``module.py`` holds ``<Noun>``, or ``<Noun><Suffix>``. The registry knows only the package; configuration, plan and
report ask it for the options class, the model asks it for the module class.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from lib.binding import Value, bind


class Registry:
    """One kind of part: registry name → package.

    With ``choice``, exactly one part is selected, by the Kconfig choice of that name. Without it, a
    part is selected by the bool symbol that is its name in capitals, and any number may be.
    """

    def __init__(
        self, kind: str, *, choice: str = "", suffix: str = "", parts: Mapping[str, str]
    ) -> None:
        self.kind = kind
        self.choice = choice
        # Ends the module's class name, where a noun alone would not do: ``NonePruner``.
        self.suffix = suffix
        self._packages = dict(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packages)

    def symbols(self) -> list[str]:
        """The Kconfig names that select parts: the choice, or one bool each."""
        return [self.choice] if self.choice else [name.upper() for name in self]

    def selected(self, values: Mapping[str, Value]) -> list[str]:
        """The names that a configuration selects, in registry order."""
        if self.choice:
            return [str(values[self.choice])]
        return [name for name in self if values[name.upper()]]

    def bind(self, values: Mapping[str, Value]) -> tuple:
        """The options of every selected part, filled from the configuration."""
        return tuple(bind(self.options(name), values) for name in self.selected(values))

    def options(self, name: str) -> type:
        """The options class of ``name``; imports no torch. ValueError names the known ones."""
        return self._load(name, "options", "Options")

    def module(self, name: str) -> type:
        """The class that builds ``name``. ValueError names the known ones."""
        return self._load(name, "module", self.suffix)

    def reference(self, name: str) -> type:
        """The class with the formulas of ``name`` on plain numbers. ValueError names the known ones."""
        return self._load(name, "reference", "Reference")

    def _load(self, name: str, module: str, suffix: str) -> type:
        if name not in self._packages:
            known = ", ".join(self._packages)
            raise ValueError(f"unknown {self.kind} {name!r}; known: {known}")
        noun = "".join(word.capitalize() for word in name.split("_"))
        found: type = vars(import_module(f"{self._packages[name]}.{module}"))[noun + suffix]
        return found
