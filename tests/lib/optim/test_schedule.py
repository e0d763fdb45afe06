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


@pytest.mark.parametrize(
    ("step", "progress", "warmup", "expected"),
    [
        # Continuous whatever the warm-up used of a time budget.
        *((100, used, used, 6e-4) for used in (0.0, 0.1, 0.37, 0.9)),
        *((5000, 1.0, used, 6e-5) for used in (0.0, 0.1, 0.37, 0.9)),
        # Progress beyond the budget, and a warm-up longer than it, or as long.
        (1200, 1.2, 0.1, 6e-5),
        (9, 0.9, 10.0, 6e-5),
        (100, 1.0, 1.0, 6e-5),
    ],
)
def test_bounds_of_warm_up_and_budget(step, progress, warmup, expected):
    assert learning_rate_at(OPTIONS, step, progress, warmup) == pytest.approx(expected)
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
