"""Optimizers as in their papers' algorithms, in scalar Python float64."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lib.optim.options import (
    AdamFamilyOptions,
    AdamOptions,
    AdamwadvOptions,
    AdamwOptions,
    AdamwspamOptions,
    OptimizerOptions,
    SgdOptions,
)


class AdamReference:
    """Reference of Adam, AdamW and AMSGrad; ``decays`` has one weight decay per tensor."""

    def __init__(
        self, parameters: list[list[float]], options: AdamFamilyOptions, decays: Sequence[float]
    ) -> None:
        self.parameters = parameters
        self.options = options
        self.decays = decays
        self._reset()

    def step(self, gradients: list[list[float]], lr: float, norm: float | None = None) -> None:
        """Update θ ← θ − lr m̂ / (√v̂ + ε) with m̂ = m / (1 − β1ᵗ), v̂ = v / (1 − β2ᵗ).

        Weight decay comes first: θ ← θ − lr λ θ if decoupled, g ← g + λ θ if not.
        """
        o = self.options
        self.t += 1
        for k, gradient in enumerate(gradients):
            for i, g in enumerate(gradient):
                weight = self.parameters[k][i]
                if o.decoupled:
                    weight -= lr * self.decays[k] * weight
                else:
                    g += self.decays[k] * weight
                self._move(k, i, weight, g, lr)

    def _move(
        self, k: int, i: int, weight: float, g: float, lr: float, damping: Any = (1, 1)
    ) -> None:
        o = self.options
        self.m[k][i] = o.beta1 * damping[0] * self.m[k][i] + (1 - o.beta1) * g
        self.v[k][i] = o.beta2 * damping[1] * self.v[k][i] + (1 - o.beta2) * g * g
        self.v_max[k][i] = max(self.v_max[k][i], self.v[k][i])
        v = self.v_max[k][i] if o.amsgrad else self.v[k][i]
        m_hat = self.m[k][i] / (1 - o.beta1**self.t)
        v_hat = v / (1 - o.beta2**self.t)
        self.parameters[k][i] = weight - lr * m_hat / (math.sqrt(v_hat) + o.eps)

    def _reset(self) -> None:
        self.m, self.v, self.v_max = (
            [[0.0] * len(tensor) for tensor in self.parameters] for _ in range(3)
        )
        self.t = 0

    def forget(self, k: int, i: int) -> None:
        """Zero the state of element ``i`` of tensor ``k``, as pruning does."""
        self.m[k][i] = self.v[k][i] = self.v_max[k][i] = 0.0


class AdamwspamReference(AdamReference):
    """Reference of AdamW with SPAM."""

    options: AdamwspamOptions

    def __init__(
        self, parameters: list[list[float]], options: AdamwspamOptions, decays: Sequence[float]
    ) -> None:
        super().__init__(parameters, options, decays)
        self.norms: list[float] = []
        self.n = 0
        self.spikes: list[int] = []
        self.clipped: list[tuple[int, int, int]] = []

    def step(self, gradients: list[list[float]], lr: float, norm: float | None = None) -> None:
        """Apply the five parts of a step as listed in the docstring of ``lib.optim.spam``."""
        o = self.options
        self.n += 1
        if self.n > 1 and (self.n - 1) % o.interval == 0:
            self._reset()
        self.t += 1
        if self._is_spike(gradients, norm):
            self.spikes.append(self.n)
            damping = (o.moment_damping, o.variance_damping)
        else:
            damping = (1.0, 1.0)
        for k, gradient in enumerate(gradients):
            for i, g in enumerate(gradient):
                rate = lr * self._warmup()
                weight = self.parameters[k][i] * (1 - rate * self.decays[k])
                self._move(k, i, weight, self._clip(k, i, g), rate, damping)

    def _is_spike(self, gradients: list[list[float]], norm: float | None) -> bool:
        o = self.options
        if norm is None:
            norm = math.sqrt(sum(g * g for gradient in gradients for g in gradient))
        window = self.norms[-o.spike_window :]
        self.norms.append(norm)
        if len(window) < o.spike_window:
            return False
        mean = sum(window) / len(window)
        sigma = math.sqrt(sum((x - mean) ** 2 for x in window) / len(window))
        return norm > mean + o.spike_threshold * sigma

    def _clip(self, k: int, i: int, g: float) -> float:
        limit = math.sqrt(self.options.theta * self.v[k][i])
        if self.t < self.options.clip_delay or limit == 0.0 or abs(g) <= limit:
            return g
        self.clipped.append((self.n, k, i))
        return math.copysign(limit, g)

    def _warmup(self) -> float:
        o = self.options
        if self.n <= o.interval or self.t >= o.reset_warmup_steps:
            return 1.0
        return 0.5 * (1 - math.cos(math.pi * self.t / o.reset_warmup_steps))


class SgdReference:
    """Reference of SGD with momentum."""

    def __init__(
        self, parameters: list[list[float]], options: SgdOptions, decays: Sequence[float]
    ) -> None:
        self.parameters = parameters
        self.options = options
        self.decays = decays
        self.buffers = [[0.0] * len(tensor) for tensor in parameters]
        self.t = 0

    def step(self, gradients: list[list[float]], lr: float, norm: float | None = None) -> None:
        """Update g ← g + λθ; b ← μ b + (1 − d) g (b = g at first); θ ← θ − lr (b, or g + μ b)."""
        o = self.options
        self.t += 1
        for k, gradient in enumerate(gradients):
            for i, g in enumerate(gradient):
                g += self.decays[k] * self.parameters[k][i]
                if self.t == 1:
                    buffer = g
                else:
                    buffer = o.momentum * self.buffers[k][i] + (1 - o.dampening) * g
                self.buffers[k][i] = buffer
                if o.momentum == 0.0:
                    update = g
                else:
                    update = g + o.momentum * buffer if o.nesterov else buffer
                self.parameters[k][i] -= lr * update

    def forget(self, k: int, i: int) -> None:
        """Zero the state of element ``i`` of tensor ``k``, as pruning does."""
        self.buffers[k][i] = 0.0


OptimizerReference = SgdReference | AdamReference
REFERENCES: dict[
    type[Any], Callable[[list[list[float]], Any, Sequence[float]], OptimizerReference]
] = {
    SgdOptions: SgdReference,
    AdamOptions: AdamReference,
    AdamwOptions: AdamReference,
    AdamwadvOptions: AdamReference,
    AdamwspamOptions: AdamwspamReference,
}


def optimizer_reference(
    options: OptimizerOptions, parameters: list[list[float]], decays: Sequence[float]
) -> OptimizerReference:
    """Return the scalar reference of an optimizer, in Python float64.

    ``parameters`` has one list of floats per tensor, updated in place; ``decays`` one weight decay
    per tensor.
    """
    rule = options.rule
    return REFERENCES[type(rule)](parameters, rule, decays)
