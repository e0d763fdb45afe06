"""A parsed Kconfig tree that resolves any number of configurations."""

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
_OLDDEFCONFIG = "make olddefconfig drops lines of .config that no longer apply"


class Tree:
    """Symbols of ``root/Kconfig``; ``kconf`` is kconfiglib's tree in its last resolved state.

    Not thread-safe.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.kconf = load_kconfig(root)
        self._touched: set[Symbol] = set()

    def resolve(self, layers: Sequence[Layer]) -> Resolution:
        """Apply the layers in order; a later layer overrides an earlier one.

        Every assignment must take effect when its layer is applied, and remain in effect until a
        later layer assigns the symbol (or another member of its choice) or makes it unavailable.
        Raises ConfigError with all problems of all layers.
        """
        return self.checked(layers, dict)[0]

    def checked(
        self, layers: Sequence[Layer], rules: Callable[[Mapping[str, Value]], T]
    ) -> tuple[Resolution, T]:
        """Resolve ``layers`` and return the resolution and the result of ``rules`` on its values.

        ``rules`` checks conditions that Kconfig cannot express and raises ConfigError; each problem
        that begins with ``NAME:`` is located at the line that set NAME. All problems are raised
        together, except rule problems about a symbol whose assignment failed, because its value is
        not the requested one.
        """
        findings, effective = self._apply(layers)
        problems = [self._with_value(p) for layer in layers for p in layer.problems]
        problems += [self._with_value(f.problem, f.assignment.name) for f in findings]
        broken, hidden, deciding = self._check_effective(effective)
        if any(finding.stale for finding in findings):
            advice = "\n        ".join(filter(None, (problems[-1].next, _OLDDEFCONFIG)))
            problems[-1] = dataclasses.replace(problems[-1], next=advice)
        problems += broken
        values = {item.name: typed_value(item) for item in self.items()}
        origins = {name: deciding.get(name) for name in values}
        resolution = Resolution(values, origins, tuple(layers), tuple(hidden))
        try:
            result = rules(values)
        except ConfigError as error:
            failed = self._names(problem.what for problem in problems)
            others = locate(error, resolution).problems
            raise ConfigError(*problems, *(p for p in others if not failed & _words(p))) from None
        if problems:
            raise ConfigError(*problems)
        return resolution, result

    def adapt(self, layer: Layer) -> tuple[Layer, list[Problem]]:
        """Drop the assignments of an old ``.config`` that no longer apply.

        Returns the adapted layer and the problems of the dropped assignments: unknown symbols,
        derived symbols and unmet dependencies. Any other invalid assignment remains, and
        ``resolve`` raises it.
        """
        dropped: list[Problem] = []
        assignments = tuple(a for a in layer.assignments if not self._is_deselection(a))
        while True:
            layer = Layer(layer.label, assignments, layer.problems)
            stale = [finding for finding in self._apply([layer])[0] if finding.stale]
            if not stale:
                return layer, dropped
            dropped += [finding.problem for finding in stale]
            outdated = [finding.assignment for finding in stale]
            assignments = tuple(a for a in assignments if a not in outdated)

    def config_text(self, layers_or_resolution: Sequence[Layer] | Resolution) -> str:
        """Return the full canonical ``.config``. Raises ConfigError like ``resolve``."""
        self.resolve(_layers(layers_or_resolution))
        return self.kconf.config_text()

    def minimal(self, layers_or_resolution: Sequence[Layer] | Resolution) -> str:
        """Return only the settings that differ from their defaults.

        Raises ConfigError like ``resolve``.
        """
        self.resolve(_layers(layers_or_resolution))
        return self.kconf.minimal_text()

    def write_config(
        self, layers_or_resolution: Sequence[Layer] | Resolution, path: Path
    ) -> Resolution:
        """Write ``.config`` and its origins; a different previous file is saved as ``.config.old``.

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
        """Return the nearest names to an unknown name as the tail of an error message, or ""."""
        names = [info.name for info in self.symbols()]
        near = difflib.get_close_matches(name.upper(), names, n=3)
        return f"; nearest: {', '.join(near)}" if near else ""

    def symbols(self) -> list[SymbolInfo]:
        """Return every settable choice, then every settable symbol, members of choices included."""
        return describe(self.kconf)

    def new_symbols(self, layer: Layer) -> list[Symbol]:
        """Return the currently settable symbols that ``layer``, resolved last, does not mention."""
        names = {assignment.name for assignment in layer.assignments}
        symbols = self.kconf.unique_defined_syms
        return [s for s in symbols if s.visibility and s.name not in names]

    def find(self, name: str) -> Symbol | Choice | None:
        """Return the symbol or choice called ``name``, or None."""
        symbol = self.kconf.syms.get(name)
        return symbol if symbol and symbol.nodes else self.kconf.named_choices.get(name)

    def items(self) -> list[Symbol | Choice]:
        """Return everything with a value: symbols outside choices, and choices."""
        symbols = [s for s in self.kconf.unique_defined_syms if s.choice is None]
        return symbols + list(self.kconf.unique_choices)

    def default(self, item: Symbol | Choice) -> str:
        """Return the text of the value that ``item`` would currently have without an assignment."""
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
        """Set every assignment; return the failures and the last effective assignment by item."""
        for symbol in self._touched:
            symbol.unset_value()
            if symbol.choice:
                symbol.choice.unset_value()
        self._touched.clear()
        self.kconf.warnings.clear()
        findings: list[Finding] = []
        effective: dict[str, Origin] = {}
        for layer in layers:
            valid, failed = check_form(self.kconf, layer)
            for assignment in valid:
                self._set(assignment)
            failed += check_effect(self.kconf, layer, valid)
            findings += sorted(failed, key=lambda f: layer.assignments.index(f.assignment))
            self._record_effective(effective, layer, valid, {f.assignment.name for f in failed})
        return findings, effective

    def _record_effective(
        self,
        effective: dict[str, Origin],
        layer: Layer,
        valid: Sequence[Assignment],
        failed: Set[str],
    ) -> None:
        """Update ``effective`` with the assignments of ``layer`` that took effect."""
        for name in failed:
            effective.pop(self._key(name), None)
        for assignment in valid:
            if assignment.name in failed or self._is_deselection(assignment):
                continue
            symbol = self.kconf.syms[assignment.name]
            if layer.label == "config" and not symbol.visibility:
                # A full .config lists derived values too; they are not requests.
                symbol.unset_value()
            else:
                origin = Origin(**vars(assignment), label=layer.label)
                effective[self._key(assignment.name)] = origin

    def _key(self, name: str) -> str:
        """Return the name under which a symbol's value is stored: the choice of a choice member."""
        symbol = self.kconf.syms.get(name)
        return name if symbol is None or symbol.choice is None else str(symbol.choice.name)

    def _set(self, assignment: Assignment) -> None:
        symbol = self.kconf.syms[assignment.name]
        if has_prompt(symbol):
            self._touched.add(symbol)
            symbol.set_value(assignment.value)

    def _names(self, texts: Iterable[str]) -> set[str]:
        """Return the symbols in the problems ``NAME=value: …``, and the choices of the symbols."""
        names = {text.partition("=")[0] for text in texts}
        return names | {self._key(name) for name in names}

    def _with_value(self, problem: Problem, name: str = "") -> Problem:
        """Return ``problem`` with the value that kconfiglib would silently use instead.

        The symbol is ``name``, or the first CONFIG_NAME in the problem.
        """
        match = re.search(r"CONFIG_(\w+)", problem.what)
        item = self.find(self._key(name or (match[1] if match else "")))
        if item is None:
            return problem
        value = f"be {value_text(item)}" if value_text(item) else "have no value"
        return dataclasses.replace(problem, next=f"if ignored, {item.name} would {value}")

    def _is_deselection(self, assignment: Assignment) -> bool:
        """Return whether the assignment is a choice member's n, implied by another member's y."""
        symbol = self.kconf.syms.get(assignment.name)
        return bool(symbol and symbol.choice and assignment.value == "n")

    def _check_effective(
        self, effective: Mapping[str, Origin]
    ) -> tuple[list[Problem], list[Problem], dict[str, Origin]]:
        """Return problems that later layers caused, hidden assignments, and deciding origins."""
        broken: list[Problem] = []
        hidden: list[Problem] = []
        deciding: dict[str, Origin] = {}
        for key, origin in effective.items():
            symbol = self.kconf.syms[origin.name]
            if holds(symbol, origin):
                if symbol.visibility:
                    deciding[key] = origin
                continue
            failure = explain_failure(symbol, origin)
            what = f"{origin.name}={origin.value}: {failure.what}"
            problem = Problem(what, origin.where, code=failure.code)
            (broken if symbol.visibility else hidden).append(problem)
        return broken, hidden, deciding


def _words(problem: Problem) -> set[str]:
    return set(re.findall(r"\w+", problem.what))


def _layers(layers_or_resolution: Sequence[Layer] | Resolution) -> Sequence[Layer]:
    if isinstance(layers_or_resolution, Resolution):
        return layers_or_resolution.layers
    return layers_or_resolution
