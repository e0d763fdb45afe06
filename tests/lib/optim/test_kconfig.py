"""Tests of the Kconfig defaults of optimizers and schedules."""

from collections.abc import Callable

import pytest

from lib.config.field import SymbolValue, from_symbols
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.optim.options import ADAMWPRUNE_BASES, OPTIMIZERS
from lib.optim.schedule import ScheduleOptions, learning_rate_at


@pytest.fixture(scope="module")
def values(tree: KconfigTree) -> Callable[[dict[str, SymbolValue]], dict[str, SymbolValue]]:
    """Return a function from symbols to all resolved values."""
    return lambda settings: tree.resolve([ConfigLayer.of("test", "test", settings)]).values


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd"])
def test_every_adam_binds_from_defaults(options_of: Callable, name: str) -> None:
    options = options_of({f"OPTIMIZER_{name.upper()}": True})
    assert (options.name, options.weight_decay) == (name, 0.1)
    base = options.base if name == "adamwprune" else options
    assert (base.beta1, base.beta2, base.eps) == (0.9, 0.95, 1e-8)
    assert base.decoupled == (base.name != "adam") and base.amsgrad == (base.name == "adamwadv")


def test_sgd_binds_from_defaults(options_of: Callable) -> None:
    options = options_of({"OPTIMIZER_SGD": True})
    assert (options.momentum, options.dampening, options.nesterov) == (0.9, 0.0, False)
    assert options.summary.startswith("sgd, ")
    assert "0.9" in options.summary and "0.1" in options.summary


def test_adamwprune_is_built_on_adamw_and_brings_state_pruning(values: Callable) -> None:
    found = values({"OPTIMIZER_ADAMWPRUNE": True})
    assert (found["ADAMWPRUNE_BASE"], found["PRUNING"]) == ("adamw", "state")
    assert found["ADAMWPRUNE_VARIANT"] == "bitter0"
    assert found["ADAMWPRUNE_BASE"] in ADAMWPRUNE_BASES


def test_defaults_are_the_studys(options_of: Callable, values: Callable) -> None:
    assert values({})["OPTIMIZER"] == "adamw"
    options = options_of({"OPTIMIZER_ADAMWSPAM": True})
    assert (options.theta, options.clip_delay, options.interval) == (50.0, 20, 500)
    assert (options.spike_threshold, options.spike_window) == (2.0, 100)
    assert (options.moment_damping, options.variance_damping) == (0.5, 0.9)
    assert (options.reset_warmup_steps, options.amsgrad) == (150, False)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_binds_and_evaluates(values: Callable, kind: str) -> None:
    options = from_symbols(ScheduleOptions, values({f"LR_SCHEDULE_{kind.upper()}": True}))
    assert options.kind == kind
    assert learning_rate_at(options, 1999, 0.2, 0.2) == pytest.approx(6e-4)
