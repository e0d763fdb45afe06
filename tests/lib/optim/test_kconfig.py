"""Kconfig and dataclasses say the same: names, defaults, help."""

from pathlib import Path

import kconfiglib
import pytest

from lib.binding import Value, bind, bound_fields
from lib.optim import OPTIMIZERS
from lib.optim.schedule import ScheduleOptions, learning_rate_at
from lib.project import ROOT


@pytest.fixture
def kconf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kconfiglib.Kconfig:
    root = tmp_path / "Kconfig"
    root.write_text('source "lib/optim/Kconfig"\n')
    monkeypatch.setenv("srctree", str(ROOT))
    return kconfiglib.Kconfig(str(root), warn_to_stderr=False)


def _values(kconf: kconfiglib.Kconfig) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for sym in kconf.unique_defined_syms:
        if sym.choice is None:
            convert = {kconfiglib.BOOL: lambda s: s == "y", kconfiglib.INT: int}
            if sym.str_value:
                values[sym.name] = convert.get(sym.orig_type, str)(sym.str_value)
    for choice in kconf.unique_choices:
        member = choice.selection.name
        values[choice.name] = member.removeprefix(f"{choice.name}_").lower()
    return values


def test_parses_without_warnings(kconf: kconfiglib.Kconfig) -> None:
    assert kconf.warnings == []


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_binds_from_defaults(kconf: kconfiglib.Kconfig, name: str) -> None:
    kconf.syms[f"OPTIMIZER_{name.upper()}"].set_value("y")
    (options,) = OPTIMIZERS.bind(_values(kconf))
    assert options.name == name
    assert (options.beta1, options.beta2, options.eps) == (0.9, 0.95, 1e-8)


def test_defaults_are_the_studys(kconf: kconfiglib.Kconfig) -> None:
    assert _values(kconf)["OPTIMIZER"] == "adamw"
    kconf.syms["OPTIMIZER_ADAMWSPAM"].set_value("y")
    (options,) = OPTIMIZERS.bind(_values(kconf))
    assert (options.theta, options.clip_delay, options.interval) == (50.0, 20, 500)
    assert (options.spike_threshold, options.spike_window) == (2.0, 100)
    assert (options.moment_damping, options.variance_damping) == (0.5, 0.9)
    assert (options.reset_warmup_steps, options.amsgrad) == (150, False)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_binds_and_evaluates(kconf: kconfiglib.Kconfig, kind: str) -> None:
    kconf.syms[f"LR_SCHEDULE_{kind.upper()}"].set_value("y")
    options = bind(ScheduleOptions, _values(kconf))
    assert options.kind == kind
    assert learning_rate_at(options, 1999, 0.2, 0.2) == pytest.approx(6e-4)


def test_symbols_and_fields_match(kconf: kconfiglib.Kconfig) -> None:
    classes = [ScheduleOptions, *(OPTIMIZERS.options(name) for name in OPTIMIZERS)]
    fields = {f.metadata["symbol"] for c in classes for f in bound_fields(c)}
    members = {sym.name for choice in kconf.unique_choices for sym in choice.syms}
    symbols = {s.name for s in kconf.unique_defined_syms} - members
    choices = {choice.name for choice in kconf.unique_choices} - {"OPTIMIZER"}
    # The trainer's own options hold GRAD_CLIP.
    assert fields | {"GRAD_CLIP"} == symbols | choices


def test_every_prompt_has_help(kconf: kconfiglib.Kconfig) -> None:
    nodes = [node for node in kconf.node_iter() if node.prompt and node.item != kconfiglib.MENU]
    assert [n.prompt[0] for n in nodes if not n.help] == []
