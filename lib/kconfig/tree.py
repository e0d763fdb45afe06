"""One parsed Kconfig tree, on which any number of configurations is resolved."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeVar

from kconfiglib import Choice, Symbol

from lib.binding import Value
from lib.errors import ConfigError, Problem
from lib.kconfig.check import (
    Finding,
    check_effect,
    check_form,
    definition,
    explain_failure,
    has_prompt,
    holds,
)
from lib.kconfig.describe import SymbolInfo, describe, typed_value, value_text
from lib.kconfig.layers import Assignment, Layer, Origin, Resolution, locate
from lib.kconfig.load import load_kconfig
from lib.kconfig.origins import write_origins
from lib.kconfig.save import save_config
from lib.project import ROOT

T = TypeVar("T")
_OLDDEFCONFIG = "make olddefconfig drops the lines of .config that no longer apply"


class Tree:
    """The symbols of ``root/Kconfig``; ``kconf`` is kconfiglib's object, as last resolved.

    Not for use by several threads at once.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.kconf = load_kconfig(root)
        self._touched: set[Symbol] = set()

    def resolve(self, layers: Sequence[Layer]) -> Resolution:
        """Apply the layers in order, a later one over an earlier one.

        Every assignment must hold when its layer has been applied, and afterwards until a later
        layer assigns the symbol (or another member of its choice) or makes it unavailable.
        Raises ConfigError with all problems of all layers.
        """
        return self.checked(layers, dict)[0]

    def checked(
        self, layers: Sequence[Layer], rules: Callable[[Mapping[str, Value]], T]
    ) -> tuple[Resolution, T]:
        """``resolve``, and what ``rules`` makes of the values.

        ``rules`` raises ConfigError with what Kconfig cannot say of values: each problem that begins
        with ``NAME:`` then points at the line that set NAME. All problems come at once, but none that
        names a symbol whose assignment did not take: its value is not what was asked for.
        """
        findings, standing = self._apply(layers)
        problems = [self._with_value(p) for layer in layers for p in layer.problems]
        problems += [self._with_value(f.problem, f.assignment.name) for f in findings]
        broken, hidden, deciding = self._check_standing(standing)
        if any(finding.stale for finding in findings):
            advice = "\n        ".join(filter(None, (problems[-1].next, _OLDDEFCONFIG)))
            problems[-1] = dataclasses.replace(problems[-1], next=advice)
        problems += broken
        values = {item.name: typed_value(item) for item in self.items()}
        origins = {name: deciding.get(name) for name in values}
        resolution = Resolution(values, origins, tuple(layers), tuple(hidden))
        try:
            made = rules(values)
        except ConfigError as error:
            failed = self._names(problem.what for problem in problems)
            others = locate(error, resolution).problems
            raise ConfigError(*problems, *(p for p in others if not failed & _words(p))) from None
        if problems:
            raise ConfigError(*problems)
        return resolution, made

    def adapt(self, layer: Layer) -> tuple[Layer, list[Problem]]:
        """An old ``.config`` (label "config") without what no longer applies, and what that was.

        Dropped are unknown and derived symbols and unmet dependencies; anything else that is wrong
        stays, for ``resolve`` to refuse.
        """
        dropped: list[Problem] = []
        kept = tuple(a for a in layer.assignments if not self._is_deselection(a))
        while True:
            layer = Layer(layer.label, kept, layer.problems)
            stale = [finding for finding in self._apply([layer])[0] if finding.stale]
            if not stale:
                return layer, dropped
            dropped += [finding.problem for finding in stale]
            gone = [finding.assignment for finding in stale]
            kept = tuple(assignment for assignment in kept if assignment not in gone)

    def config_text(self, layers_or_resolution: Sequence[Layer] | Resolution) -> str:
        """The full canonical ``.config``. ConfigError as in ``resolve``."""
        self.resolve(_layers(layers_or_resolution))
        return self.kconf.config_text()

    def minimal(self, layers_or_resolution: Sequence[Layer] | Resolution) -> str:
        """The savedefconfig text: only what differs from the defaults. ConfigError as before."""
        self.resolve(_layers(layers_or_resolution))
        return self.kconf.minimal_text()

    def write_config(
        self, layers_or_resolution: Sequence[Layer] | Resolution, path: Path
    ) -> Resolution:
        """Write ``.config`` and its origins; a differing older one is kept as ``.config.old``.

        An identical file keeps its modification time, so that make rebuilds nothing.
        """
        resolution = layers_or_resolution
        if not isinstance(resolution, Resolution):
            resolution = self.resolve(resolution)
        save_config(path, self.config_text(resolution))
        defaults = {item.name: definition(item) for item in self.items()}
        write_origins(path, resolution, defaults)
        return resolution

    def nearest(self, name: str) -> str:
        """The end of an error about an unknown name: what it may have meant, if anything."""
        names = [info.name for info in self.symbols()]
        near = difflib.get_close_matches(name.upper(), names, n=3)
        return f"; nearest: {', '.join(near)}" if near else ""

    def symbols(self) -> list[SymbolInfo]:
        """What can be set: every choice, then every prompted symbol, choice members included."""
        return describe(self.kconf)

    def new_symbols(self, layer: Layer) -> list[Symbol]:
        """What a user could set now, having resolved ``layer``, that it does not mention."""
        known = {assignment.name for assignment in layer.assignments}
        symbols = self.kconf.unique_defined_syms
        return [s for s in symbols if s.visibility and s.name not in known]

    def find(self, name: str) -> Symbol | Choice | None:
        """The symbol or choice called ``name``, or None."""
        symbol = self.kconf.syms.get(name)
        return symbol if symbol and symbol.nodes else self.kconf.named_choices.get(name)

    def items(self) -> list[Symbol | Choice]:
        """All that has a value: symbols that are no choice members, and choices."""
        symbols = [s for s in self.kconf.unique_defined_syms if s.choice is None]
        return symbols + list(self.kconf.unique_choices)

    def default(self, item: Symbol | Choice) -> str:
        """The text of the value that ``item`` would have now if nobody had set it."""
        if isinstance(item, Choice):
            selected = item.user_selection
            item.unset_value()
            text = value_text(item)
            if selected is not None:
                selected.set_value("y")
            return text
        assigned = item.user_value
        item.unset_value()
        text = value_text(item)
        if assigned is not None:
            item.set_value(assigned)
        return text

    def _apply(self, layers: Sequence[Layer]) -> tuple[list[Finding], dict[str, Origin]]:
        """Set everything; what failed, and by item the last assignment that held."""
        for symbol in self._touched:
            symbol.unset_value()
            if symbol.choice:
                symbol.choice.unset_value()
        self._touched.clear()
        self.kconf.warnings.clear()
        findings: list[Finding] = []
        standing: dict[str, Origin] = {}
        for layer in layers:
            good, bad = check_form(self.kconf, layer)
            for assignment in good:
                self._set(assignment)
            bad += check_effect(self.kconf, layer, good)
            findings += sorted(bad, key=lambda f: layer.assignments.index(f.assignment))
            self._note_standing(standing, layer, good, {f.assignment.name for f in bad})
        return findings, standing

    def _note_standing(
        self, standing: dict[str, Origin], layer: Layer, tried: Sequence[Assignment], bad: Set[str]
    ) -> None:
        """Enter what holds into ``standing``; a layer overrides what earlier ones asked for."""
        for name in bad:
            standing.pop(self._key(name), None)
        for assignment in tried:
            if assignment.name in bad or self._is_deselection(assignment):
                continue
            symbol = self.kconf.syms[assignment.name]
            if layer.label == "config" and not symbol.visibility:
                # A full .config states derived values as well; nobody asked for those.
                symbol.unset_value()
            else:
                origin = Origin(**vars(assignment), label=layer.label)
                standing[self._key(assignment.name)] = origin

    def _key(self, name: str) -> str:
        """The name that a symbol's value goes by: its own, or its choice's."""
        symbol = self.kconf.syms.get(name)
        return name if symbol is None or symbol.choice is None else str(symbol.choice.name)

    def _set(self, assignment: Assignment) -> None:
        symbol = self.kconf.syms[assignment.name]
        if has_prompt(symbol):
            self._touched.add(symbol)
            symbol.set_value(assignment.value)

    def _names(self, texts: Iterable[str]) -> set[str]:
        """What the problems ``NAME=value: …`` are about: symbols, and the choices they belong to."""
        names = {text.partition("=")[0] for text in texts}
        return names | {self._key(name) for name in names}

    def _with_value(self, problem: Problem, name: str = "") -> Problem:
        """``problem`` with the value that kconfiglib would go on with, without a word.

        The symbol is ``name``, else the first that the problem speaks of.
        """
        spoken = re.search(r"CONFIG_(\w+)", problem.what)
        found = self.find(self._key(name or (spoken[1] if spoken else "")))
        if found is None:
            return problem
        value = f"be {value_text(found)}" if value_text(found) else "have no value"
        return dataclasses.replace(problem, next=f"let pass, {found.name} would {value}")

    def _is_deselection(self, assignment: Assignment) -> bool:
        """Whether it is the n of a choice member, which the y of another member implies."""
        symbol = self.kconf.syms.get(assignment.name)
        return bool(symbol and symbol.choice and assignment.value == "n")

    def _check_standing(
        self, standing: Mapping[str, Origin]
    ) -> tuple[list[Problem], list[Problem], dict[str, Origin]]:
        """What later layers broke, what they made unavailable, and what decides a value now."""
        broken: list[Problem] = []
        hidden: list[Problem] = []
        deciding: dict[str, Origin] = {}
        for key, origin in standing.items():
            symbol = self.kconf.syms[origin.name]
            if holds(symbol, origin):
                if symbol.visibility:
                    deciding[key] = origin
                continue
            text = f"{origin.name}={origin.value}: {explain_failure(symbol, origin)}"
            (broken if symbol.visibility else hidden).append(Problem(text, origin.where))
        return broken, hidden, deciding


def _words(problem: Problem) -> set[str]:
    return set(re.findall(r"\w+", problem.what))


def _layers(layers_or_resolution: Sequence[Layer] | Resolution) -> Sequence[Layer]:
    if isinstance(layers_or_resolution, Resolution):
        return layers_or_resolution.layers
    return layers_or_resolution
