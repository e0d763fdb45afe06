"""Unstable steps of a training: jumps of loss or gradient norm, losses worse than guessing.

A monitor reads the steps in order, in the trainer and from the records of a run alike. An alarm
requires more than the scatter of the steps before, so that noise raises none, however long the run is.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lib.runs.record import RunRecord, derived

# A loss this far above, or a gradient norm this many times, the median of the steps before is a jump.
_LOSS_JUMP_NATS = 1.0
_NORM_JUMP = 10.0
# Steps of that median, and the smallest number that has one.
_WINDOW = 20
_MIN_STEPS = 5


@dataclass(frozen=True)
class UnstableStep:
    """A training step that was unstable, and why."""

    iteration: int
    loss: float
    reason: str


class StabilityMonitor:
    """The last steps of a training, with which the next one is compared."""

    def __init__(self, warmup_steps: int, vocab_size: int) -> None:
        self._warmup_steps = warmup_steps
        # A damaged record can contain any number.
        self._uniform = math.log(max(1, vocab_size))
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)

    def check(self, iteration: int, loss: float, grad_norm: float | None) -> UnstableStep | None:
        """Return the next step if it is unstable; ``grad_norm`` is None after an fp16 overflow."""
        reasons = []
        # No median is below the smallest value: the medians of most steps need not be computed.
        # Half of a jump, to be above any rounding.
        lowest = min(self._losses, default=math.inf)
        if loss > min(self._uniform, lowest + _LOSS_JUMP_NATS / 2):
            reasons += self._loss_reasons(iteration, loss)
        if grad_norm is not None:
            if grad_norm > _NORM_JUMP / 2 * min(self._norms, default=math.inf):
                reasons += self._norm_reasons(iteration, grad_norm)
            self._norms.append(grad_norm)
        self._losses.append(loss)
        return UnstableStep(iteration, loss, ", ".join(reasons)) if reasons else None

    def _loss_reasons(self, iteration: int, loss: float) -> list[str]:
        usual = _median(self._losses)
        # A loss that still falls towards guessing is no alarm.
        is_worse = iteration > self._warmup_steps and loss > max(self._uniform, usual)
        jump = loss - usual
        if is_worse and _exceeds_noise(loss - self._uniform, self._losses, iteration):
            return [f"loss {loss:.3f} after the warm-up (guessing {self._uniform:.3f})"]
        if jump > _LOSS_JUMP_NATS and _exceeds_noise(jump, self._losses, iteration):
            return [f"loss {usual:.3f} to {loss:.3f}"]
        return []

    def _norm_reasons(self, iteration: int, norm: float) -> list[str]:
        usual = _median(self._norms)
        if norm > _NORM_JUMP * usual > 0.0 and _exceeds_noise(
            math.log(norm / usual), list(map(_log, self._norms)), iteration
        ):
            return [f"gradient norm {usual:.3g} to {norm:.3g}"]
        return []


def _median(values: Sequence[float]) -> float:
    """Return the median, infinity of too few values: then nothing is a jump."""
    if len(values) < _MIN_STEPS:
        return math.inf
    # statistics.median takes three times as long.
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[~middle]) / 2


def _log(norm: float) -> float:
    return math.log(norm) if norm > 0.0 else -math.inf


def _exceeds_noise(deviation: float, values: Sequence[float], steps: int) -> bool:
    """Return whether the noise of ``values`` does not explain a deviation in that many ``steps``.

    The standard deviation is that of the differences of neighbours, from medians. The largest of n
    normal deviations is about √(2 ln n) of them; the factor before it is for heavier tails, and for
    the uncertain deviation of few values.
    """
    differences = [after - before for before, after in pairwise(values)]
    trend = _median(differences)
    scatter = 1.4826 / math.sqrt(2) * _median([abs(step - trend) for step in differences])
    margin = 2.5 + 40.0 / max(1, len(differences))
    return deviation > margin * math.sqrt(2 * math.log(max(2, steps))) * scatter


@derived
def unstable_steps(record: RunRecord) -> list[UnstableStep]:
    """Return the unstable steps of a recorded run. Raises RecordError if it cannot be read."""
    monitor = StabilityMonitor(
        record.config.value(int, "identity", "schedule", "warmup_steps"),
        record.config.value(int, "identity", "model", "shape", "vocab_size"),
    )
    steps = (monitor.check(row.iteration, row.loss, row.grad_norm) for row in record.train_rows)
    return [step for step in steps if step]


def unstable_points(record: RunRecord) -> list[tuple[int, float]]:
    """Return the training tokens and the loss of each unstable step of a run."""
    unstable = {step.iteration for step in unstable_steps(record)}
    return [(row.tokens, row.loss) for row in record.train_rows if row.iteration in unstable]


def describe_unstable(steps: Sequence[UnstableStep]) -> str:
    """Return the number of unstable steps, and the first one; "" if there are none."""
    if not steps:
        return ""
    count = f"{len(steps)} steps, the first at" if len(steps) > 1 else "a step,"
    return f"{count} it {steps[0].iteration}: {steps[0].reason}"


def instability_text(steps: Sequence[UnstableStep]) -> str:
    """Return the mark of a run with unstable steps, and their description; "" if there are none."""
    return f"UNSTABLE: {describe_unstable(steps)}" if steps else ""
