"""The learning rate at selected points, and at the bounds of warm-up and budget."""

import dataclasses
import math

import pytest

from lib.errors import ConfigError
from lib.optim.schedule import ScheduleOptions, learning_rate_at

OPTIONS = ScheduleOptions(
    learning_rate=6e-4,
    min_learning_rate=6e-5,
    warmup_steps=100,
    kind="cosine",
    wsd_decay_fraction=0.2,
)
TOTAL = 1000


def _rate(kind, step):
    options = dataclasses.replace(OPTIONS, kind=kind)
    return learning_rate_at(options, step, step / TOTAL, OPTIONS.warmup_steps / TOTAL)


@pytest.mark.parametrize(
    "kind, middle, three_quarters, nine_tenths, end",
    [
        (
            "cosine",
            3.3e-4,
            6e-5 + 2.7e-4 * (1 - math.sqrt(0.5)),
            6e-5 + 2.7e-4 * (1 - math.cos(math.pi / 10)),
            6e-5,
        ),
        ("linear", 3.3e-4, 1.95e-4, 1.14e-4, 6e-5),
        ("constant", 6e-4, 6e-4, 6e-4, 6e-4),
        # 0.2 of the 900 steps after the warm-up: from 820 on.
        ("wsd", 6e-4, 6e-4, 3.3e-4, 6e-5),
    ],
)
def test_closed_form_of_warm_up_and_decay(kind, middle, three_quarters, nine_tenths, end):
    steps = (0, 49, 99, 100, 550, 775, 910, 1000)
    expected = [6e-6, 3e-4, 6e-4, 6e-4, middle, three_quarters, nine_tenths, end]
    assert [_rate(kind, step) for step in steps] == pytest.approx(expected)


@pytest.mark.parametrize("warmup_progress", [0.0, 0.1, 0.37, 0.9])
def test_continuous_whatever_the_warm_up_used_of_a_time_budget(warmup_progress):
    start = learning_rate_at(OPTIONS, 100, warmup_progress, warmup_progress)
    assert start == pytest.approx(6e-4)
    assert learning_rate_at(OPTIONS, 5000, 1.0, warmup_progress) == pytest.approx(6e-5)


def test_bounds_of_warm_up_and_budget():
    """Progress beyond the budget, a warm-up as long as the budget, and none."""
    assert learning_rate_at(OPTIONS, 1200, 1.2, 0.1) == pytest.approx(6e-5)
    assert learning_rate_at(OPTIONS, 9, 0.9, 10.0) == pytest.approx(6e-5)
    assert learning_rate_at(OPTIONS, 100, 1.0, 1.0) == pytest.approx(6e-5)
    assert learning_rate_at(dataclasses.replace(OPTIONS, warmup_steps=0), 0, 0.0, 0.0) == 6e-4


@pytest.mark.parametrize(
    "change, symbol, code",
    [
        ({"min_learning_rate": 1e-3}, "MIN_LEARNING_RATE", "config.conflict"),
        ({"wsd_decay_fraction": 0.0}, "WSD_DECAY_FRACTION", "config.out-of-range"),
    ],
)
def test_rules_name_their_symbol(change, symbol, code):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(OPTIONS, **change)
    (problem,) = caught.value.problems
    assert problem.code == code and problem.what.startswith(f"{symbol}: ")


def test_constant_ignores_the_minimum():
    options = dataclasses.replace(OPTIONS, kind="constant", min_learning_rate=1.0)
    assert learning_rate_at(options, 1000, 1.0, 0.1) == 6e-4
    assert options.summary.startswith("constant 0.0006,") and "100" in options.summary
