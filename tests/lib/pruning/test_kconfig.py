"""Kconfig and dataclasses say the same: names, defaults, help."""

from pathlib import Path

import kconfiglib
import pytest

from lib.binding import Value, bound_fields
from lib.project import ROOT
from lib.pruning import PRUNERS


@pytest.fixture
def kconf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kconfiglib.Kconfig:
    root = tmp_path / "Kconfig"
    root.write_text('source "lib/pruning/Kconfig"\n')
    monkeypatch.setenv("srctree", str(ROOT))
    return kconfiglib.Kconfig(str(root), warn_to_stderr=False)


def _values(kconf: kconfiglib.Kconfig) -> dict[str, Value]:
    convert = {kconfiglib.BOOL: lambda s: s == "y", kconfiglib.INT: int}
    values: dict[str, Value] = {
        sym.name: convert.get(sym.orig_type, str)(sym.str_value)
        for sym in kconf.unique_defined_syms
        if sym.choice is None and sym.str_value
    }
    for choice in kconf.unique_choices:
        if choice.selection:
            values[choice.name] = choice.selection.name.removeprefix(f"{choice.name}_").lower()
    return values


def test_parses_without_warnings(kconf: kconfiglib.Kconfig) -> None:
    assert kconf.warnings == []


def test_nothing_is_pruned_by_default(kconf: kconfiglib.Kconfig) -> None:
    assert PRUNERS.bind(_values(kconf))[0].name == "none"
    assert kconf.syms["PRUNING_SPARSITY"].visibility == 0


def test_magnitude_binds_from_defaults(kconf: kconfiglib.Kconfig) -> None:
    kconf.syms["PRUNING_MAGNITUDE"].set_value("y")
    (options,) = PRUNERS.bind(_values(kconf))
    assert options.summary == "magnitude 50%, global, cubic ramp 10% to 75% of the budget"
    assert (options.frequency, options.include_embeddings) == (10, False)


def test_symbols_and_fields_match(kconf: kconfiglib.Kconfig) -> None:
    classes = [PRUNERS.options(name) for name in PRUNERS]
    fields = {f.metadata["symbol"] for c in classes for f in bound_fields(c)}
    members = {sym.name for choice in kconf.unique_choices for sym in choice.syms}
    symbols = {s.name for s in kconf.unique_defined_syms} - members
    choices = {choice.name for choice in kconf.unique_choices} - {"PRUNING"}
    assert fields == symbols | choices


def test_every_prompt_has_help(kconf: kconfiglib.Kconfig) -> None:
    nodes = [node for node in kconf.node_iter() if node.prompt and node.item != kconfiglib.MENU]
    assert [n.prompt[0] for n in nodes if not n.help] == []
