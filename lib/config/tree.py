"""The parsed Kconfig files, which resolve layers of assignments to a configuration."""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kconfiglib import BOOL, INT, TYPE_TO_STR, Choice, Kconfig, KconfigError, Symbol, expr_value

from lib.config.check import (
    AssignmentFailure,
    FailureReason,
    definition_location,
    failure_reason,
    is_settable,
    unknown_symbol,
    validate_effect,
    validate_syntax,
)
from lib.config.field import SymbolValue
from lib.config.layers import (
    Assignment,
    ConfigLayer,
    ResolvedConfig,
    ValueOrigin,
    with_locations,
    write_origins,
)
from lib.errors import ConfigError, Problem
from lib.files import write_atomic
from lib.project import ROOT


def member_values(choice: Choice) -> dict[str, Symbol]:
    """Return the members by the value of the choice: the name in lower case, without CHOICE_."""
    return {member.name.removeprefix(f"{choice.name}_").lower(): member for member in choice.syms}


def value_text(item: Symbol | Choice) -> str:
    """Return the value as text; "" for a choice that is not available."""
    if isinstance(item, Symbol):
        return str(item.str_value)
    return next((v for v, member in member_values(item).items() if member is item.selection), "")


def item_type(item: Symbol | Choice) -> str:
    """Return choice, bool, int or string."""
    return "choice" if isinstance(item, Choice) else str(TYPE_TO_STR[item.orig_type])


def typed_value(item: Symbol | Choice) -> SymbolValue:
    """Return the value with its Python type; an unavailable int is 0."""
    text = value_text(item)
    if isinstance(item, Choice):
        return text
    if item.orig_type is BOOL:
        return text == "y"
    return int(text or 0) if item.orig_type is INT else text


def capture_text(write: Callable[[str], str]) -> str:
    """Return the text that kconfiglib's ``write(path)`` writes; kconfiglib only writes files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        write(str(path))
        return path.read_text(encoding="utf-8")


def save_config(path: Path, text: str) -> bool:
    """Write ``.config``, save a different previous file as ``.old``, return whether it changed.

    Raises ConfigError if its folder cannot be created.
    """
    old = path.read_bytes() if path.is_file() else None
    if old == text.encode():
        return False
    if old is not None:
        write_atomic(path.with_name(path.name + ".old"), old)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot create the folder {path.parent}: {error.strerror}"
        problem = Problem(what, "O", "type: make O=DIR", code="usage.build-folder")
        raise ConfigError(problem) from error
    write_atomic(path, text)
    return True


HEADER = """\
#
# Kablate configuration, in full. Change it with make menuconfig, or load another
# with make defconfig-NAME SET="A=1 B=y"; make why SYM=A shows the origin of a value.
#
"""


class AtomicKconfig(Kconfig):
    """kconfiglib's tree with an atomic write of ``.config``.

    menuconfig saves through ``write_config`` too.
    """

    def config_text(self) -> str:
        """Return the full ``.config`` text of the current values."""
        return capture_text(super().write_config)

    def write_config(
        self,
        filename: str | None = None,
        header: str | None = None,
        save_old: bool = True,
        verbose: None = None,
    ) -> str:
        """Write ``filename`` and return a message; kconfiglib's other arguments are unused."""
        assert filename is not None and header is None
        changed = save_config(Path(filename), self.config_text())
        return f"{'Configuration saved to' if changed else 'No change in'} {filename}"


def load_kconfig(root: Path) -> AtomicKconfig:
    """Parse ``root/Kconfig`` and every file that it sources; the environment has no effect.

    Raises ConfigError on a syntax error and on every warning of the parser, such as that of an
    undefined symbol in a condition.
    """
    with _environment(
        srctree=str(root.resolve()),
        KCONFIG_CONFIG_HEADER=HEADER,
        KCONFIG_WARN_UNDEF="y",
        # Otherwise kconfiglib would import any module called kconfigfunctions on the path.
        KCONFIG_FUNCTIONS="lib.config.no_such_module",
    ):
        try:
            kconf = AtomicKconfig("Kconfig", warn_to_stderr=False)
        except OSError as error:
            what = "cannot read the Kconfig files"
            raise ConfigError(Problem(what, str(error), code="kconfig.unreadable")) from None
        except KconfigError as error:
            problem = Problem(str(error).strip(), code="kconfig.syntax-error")
            raise ConfigError(problem) from None
    if kconf.warnings:
        problems = (Problem(text.strip(), code="kconfig.warning") for text in kconf.warnings)
        raise ConfigError(*problems)
    return kconf


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Replace the whole environment, so that Kconfig's $(NAME) means the same everywhere."""
    saved = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


T = TypeVar("T")


class KconfigTree:
    """Symbols of ``root/Kconfig``; ``kconf`` is kconfiglib's tree in its last resolved state.

    Not thread-safe.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.kconf = load_kconfig(root)
        self._touched: set[Symbol] = set()
        self._default_items: dict[ConfigLayer, list[Symbol | Choice]] = {}

    def resolve(self, layers: Sequence[ConfigLayer]) -> ResolvedConfig:
        """Apply the layers in order; a later layer overrides an earlier one.

        Every assignment must take effect when its layer is applied, and remain in effect until a
        later layer assigns the symbol (or another member of its choice) or makes it unavailable.
        The defaults of a full layer follow the layers with ``moves_defaults``, as if their
        assignments had been typed when the configuration was loaded; other layers do not move them.
        Raises ConfigError with all problems of all layers.
        """
        return self.checked(layers, dict)[0]

    def checked(
        self, layers: Sequence[ConfigLayer], rules: Callable[[Mapping[str, SymbolValue]], T]
    ) -> tuple[ResolvedConfig, T]:
        """Resolve ``layers`` and return the resolution and the result of ``rules`` on its values.

        ``rules`` checks conditions that Kconfig cannot express and raises ConfigError; each problem
        that begins with ``NAME:`` is located at the line that set NAME. All problems are raised
        together, except rule problems about a symbol whose assignment failed, because its value is
        not the requested one.
        """
        findings, effective = self._apply(layers)
        broken, hidden, deciding = self._check_effective(effective)
        problems = [problem for layer in layers for problem in layer.problems]
        problems += [*(finding.problem for finding in findings), *broken]
        values = {item.name: typed_value(item) for item in self.items()}
        origins = {name: deciding.get(name) for name in values}
        resolution = ResolvedConfig(values, origins, tuple(layers), tuple(hidden))
        try:
            result = rules(values)
        except ConfigError as error:
            failed = self._names(problem.what for problem in problems)
            others = with_locations(error, resolution).problems
            raise ConfigError(*problems, *(p for p in others if not failed & _words(p))) from None
        if problems:
            raise ConfigError(*problems)
        return resolution, result

    def adapt(self, layer: ConfigLayer) -> tuple[ConfigLayer, list[Problem]]:
        """Drop the assignments of an old ``.config`` that no longer apply.

        Returns the adapted layer and the problems of the dropped assignments: unknown symbols,
        derived symbols and unmet dependencies. Any other invalid assignment remains, and
        ``resolve`` raises it.
        """
        dropped: list[Problem] = []
        assignments = tuple(a for a in layer.assignments if not self._is_deselection(a))
        while True:
            layer = ConfigLayer(layer.label, assignments, layer.problems)
            stale = [finding for finding in self._apply([layer])[0] if finding.stale]
            if not stale:
                return layer, dropped
            dropped += [finding.problem for finding in stale]
            outdated = [finding.assignment for finding in stale]
            assignments = tuple(a for a in assignments if a not in outdated)

    def config_text(self, layers: Sequence[ConfigLayer]) -> str:
        """Return the full canonical ``.config``. Raises ConfigError like ``resolve``."""
        self.resolve(layers)
        return self.kconf.config_text()

    def minimal(self, layers: Sequence[ConfigLayer]) -> str:
        """Return the settings that differ from their defaults. Raises ConfigError like ``resolve``."""
        self.resolve(layers)
        return capture_text(lambda path: self.kconf.write_min_config(path, header=""))

    def write_config(self, resolution: ResolvedConfig, path: Path) -> None:
        """Write ``.config`` and its origins; a different previous file is saved as ``.config.old``.

        An identical file keeps its modification time, so that make rebuilds nothing.
        """
        save_config(path, self.config_text(resolution.layers))
        defaults = {item.name: definition_location(item) for item in self.items()}
        write_origins(path, resolution, defaults)

    def unknown_symbol(self, name: str) -> FailureReason:
        """Return why ``name`` cannot be found: what replaces it, or the nearest names."""
        return unknown_symbol(name, [item.name for item in self.symbols()])

    def symbols(self) -> list[Symbol | Choice]:
        """Return every choice, then every settable symbol, members of choices included."""
        settable = [symbol for symbol in self.kconf.unique_defined_syms if is_settable(symbol)]
        return [*self.kconf.unique_choices, *settable]

    def new_symbols(self, layer: ConfigLayer) -> list[Symbol]:
        """Return the currently settable symbols that ``layer``, resolved last, does not mention."""
        names = {assignment.name for assignment in layer.assignments}
        symbols = self.kconf.unique_defined_syms
        return [s for s in symbols if s.visibility and s.name not in names]

    def applies(self, name: str) -> bool:
        """Return whether a symbol or choice has an effect in the configuration resolved last.

        It can be set, or its defaults follow another setting, as those of N_LAYER follow MODEL_SIZE.
        """
        item = self.find(name)
        if item is None or item.visibility:
            return item is not None
        return len(item.defaults) > 1 and bool(expr_value(item.direct_dep))

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
        is_choice = isinstance(item, Choice)
        assigned = item.user_selection if is_choice else item.user_value
        item.unset_value()
        text = value_text(item)
        if assigned is not None and is_choice:
            assigned.set_value("y")
        elif assigned is not None:
            item.set_value(assigned)
        return text

    def _apply(
        self, layers: Sequence[ConfigLayer]
    ) -> tuple[list[AssignmentFailure], dict[str, ValueOrigin]]:
        """Set every assignment; return the failures and the last effective assignment by item."""
        for symbol in self._touched:
            symbol.unset_value()
            if symbol.choice:
                symbol.choice.unset_value()
        self._touched.clear()
        self.kconf.warnings.clear()
        findings: list[AssignmentFailure] = []
        effective: dict[str, ValueOrigin] = {}
        defaults: list[Symbol | Choice] = []
        for layer in layers:
            if layer.label == "constants":
                layer = self._select_members(layer)
            valid, failed = validate_syntax(self.kconf, layer)
            if layer.moves_defaults:
                for item in defaults:
                    effective.pop(item.name, None)
                    item.unset_value()
            for assignment in valid:
                self._set(assignment)
            failed += validate_effect(self.kconf, layer, valid)
            findings += sorted(failed, key=lambda f: layer.assignments.index(f.assignment))
            self._record_effective(effective, layer, valid, {f.assignment.name for f in failed})
            if layer.defaults and any(other.moves_defaults for other in layers):
                defaults = [item for item in self._defaults(layer) if item.name in effective]
                continue
            assigned = {self._key(assignment.name) for assignment in layer.assignments}
            defaults = [item for item in defaults if item.name not in assigned]
            if layer.moves_defaults:
                self._keep_values(defaults)
        return findings, effective

    def _defaults(self, layer: ConfigLayer) -> list[Symbol | Choice]:
        """Return the items that ``layer``, applied last, sets to their present defaults."""
        if layer not in self._default_items:
            items = (self.find(name) for name in layer.defaults)
            self._default_items[layer] = [
                item for item in items if item and value_text(item) == self.default(item)
            ]
        return self._default_items[layer]

    def _keep_values(self, items: Iterable[Symbol | Choice]) -> None:
        """Assign each of ``items`` its value, on which layers to come then have no effect."""
        for item in items:
            symbol = item.selection if isinstance(item, Choice) else item
            if symbol and symbol.visibility:
                self._set(Assignment(symbol.name, symbol.str_value, ""))

    def _select_members(self, layer: ConfigLayer) -> ConfigLayer:
        """Return a layer of constants with each choice replaced by its selected member."""
        assignments = []
        for assignment in layer.assignments:
            if choice := self.kconf.named_choices.get(assignment.name):
                # An unavailable choice has no member.
                if not assignment.value:
                    continue
                member = member_values(choice).get(assignment.value)
                gone = f"{choice.name}_{assignment.value.upper()}"
                name = member.name if member else gone
                assignment = dataclasses.replace(assignment, name=name, value="y")
            assignments.append(assignment)
        return dataclasses.replace(layer, assignments=tuple(assignments))

    def _record_effective(
        self,
        effective: dict[str, ValueOrigin],
        layer: ConfigLayer,
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
            if layer.is_full and not symbol.visibility:
                # A full layer lists derived values too; they are not requests.
                symbol.unset_value()
            else:
                origin = ValueOrigin(**vars(assignment), label=layer.label)
                effective[self._key(assignment.name)] = origin

    def _key(self, name: str) -> str:
        """Return the name under which a symbol's value is stored: the choice of a choice member."""
        symbol = self.kconf.syms.get(name)
        return name if symbol is None or symbol.choice is None else str(symbol.choice.name)

    def _set(self, assignment: Assignment) -> None:
        symbol = self.kconf.syms[assignment.name]
        if is_settable(symbol):
            self._touched.add(symbol)
            symbol.set_value(assignment.value)

    def _names(self, texts: Iterable[str]) -> set[str]:
        """Return the symbols in the problems ``NAME=value: …``, and the choices of the symbols."""
        names = {text.partition("=")[0] for text in texts}
        return names | {self._key(name) for name in names}

    def _is_deselection(self, assignment: Assignment) -> bool:
        """Return whether the assignment is a choice member's n, implied by another member's y."""
        symbol = self.kconf.syms.get(assignment.name)
        return bool(symbol and symbol.choice and assignment.value == "n")

    def _check_effective(
        self, effective: Mapping[str, ValueOrigin]
    ) -> tuple[list[Problem], list[Problem], dict[str, ValueOrigin]]:
        """Return problems that later layers caused, hidden assignments, and deciding origins."""
        broken: list[Problem] = []
        hidden: list[Problem] = []
        deciding: dict[str, ValueOrigin] = {}
        for key, origin in effective.items():
            symbol = self.kconf.syms[origin.name]
            if symbol.str_value == origin.value:
                if symbol.visibility:
                    deciding[key] = origin
                continue
            what, code = failure_reason(symbol, origin)
            problem = Problem(f"{origin.name}={origin.value}: {what}", origin.where, code=code)
            (broken if symbol.visibility else hidden).append(problem)
        return broken, hidden, deciding


def _words(problem: Problem) -> set[str]:
    return set(re.findall(r"\w+", problem.what))
