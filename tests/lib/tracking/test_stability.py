"""Unstable steps: jumps of loss and gradient norm, and losses worse than guessing."""

import math
import random

import pytest

from lib.runs.record import RunRecord
from lib.tracking.stability import StabilityMonitor, unstable_steps
from tests.lib.fabricated import IDENTITY, changed, write_run

WARMUP_STEPS = 12
UNIFORM = math.log(257)
# The baseline of the quick start with the rate 2e-3 and 12 steps of warm-up, seed 1.
SPIKED_LOSSES = (
    *(5.570, 5.267, 4.994, 4.820, 4.697, 4.625, 4.441, 4.279, 4.085, 3.861, 3.652, 7.943),
    *(3.586, 3.448, 3.268, 3.055, 6.908, 3.277, 3.068, 2.954, 3.211, 2.976, 3.086, 2.851),
)
SPIKED_NORMS = (
    *(6.23, 5.16, 3.12, 2.70, 2.63, 2.49, 2.47, 2.38, 2.19, 2.17, 1.94, 11.22),
    *(5.57, 3.03, 1.34, 1.06, 141.69, 3.63, 0.79, 0.69, 1.85, 3.16, 0.91, 1.02),
)
FALLING = [5.6 - 0.1 * i for i in range(24)]
STEADY = [1.0] * 24


def steps(losses=FALLING, norms=STEADY):
    monitor = StabilityMonitor(WARMUP_STEPS, 257)
    rows = enumerate(zip(losses, norms, strict=True), 1)
    return [step for i, (loss, norm) in rows if (step := monitor.check(i, loss, norm))]


def with_value(values, iteration, value):
    return [*values[: iteration - 1], value, *values[iteration:]]


@pytest.mark.parametrize(
    ("iteration", "loss", "norm", "expected"),
    [
        # A jump is relative to the median of the steps before, 4.55 at step 22.
        (22, 4.5, 1.0, False),
        (22, 5.6, 1.0, True),
        (22, 3.5, 10.1, True),
        (22, 3.5, 9.9, False),
        # Above guessing, during and after the warm-up; the first steps have no median.
        (4, 5.7, 1.0, False),
        (4, 9.0, 99.0, False),
        (12, 5.7, 1.0, False),
        (13, 5.7, 1.0, True),
        # Zero gradients, as of frozen weights, are no base of a jump.
        (22, 3.5, 0.0, False),
    ],
)
def test_limits(iteration, loss, norm, expected):
    losses, norms = with_value(FALLING, iteration, loss), with_value(STEADY, iteration, norm)
    assert [step.iteration for step in steps(losses, norms)] == [iteration] * expected


@pytest.mark.parametrize("mean", [3.0, UNIFORM])
@pytest.mark.parametrize("deviation", [0.02, 0.5])
def test_noise_about_a_constant_is_stable(mean, deviation):
    draw = random.Random(1)
    losses = [draw.gauss(mean, deviation) for _ in range(2000)]
    norms = [math.exp(draw.gauss(0.0, 0.8)) for _ in range(2000)]
    assert steps(losses, norms) == []
    # The same noise does not hide a divergence.
    losses[40] += 20.0 * max(0.2, deviation)
    assert [step.iteration for step in steps(losses, norms)] == [41]


def test_a_falling_loss_is_stable():
    assert steps() == []
    # To guessing after a short warm-up, and with an overflow in half precision.
    assert steps([7.0 - 0.05 * i for i in range(24)]) == []
    assert steps(norms=[*STEADY[:10], None, *STEADY[11:]]) == []


def test_the_records_of_a_run_give_the_same_steps(tmp_path):
    identity = changed(IDENTITY, schedule__warmup_steps=WARMUP_STEPS)
    run = write_run(tmp_path / "a", identity=identity, losses=SPIKED_LOSSES)
    assert [step.iteration for step in unstable_steps(RunRecord(run))] == [12, 17]
