"""Optimizers as in their papers' algorithms, in numpy's float64."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lib.optim.options import (
    AdamFamilyOptions,
    AdamOptions,
    AdamwadvOptions,
    AdamwOptions,
    AdamwspamOptions,
    OptimizerOptions,
    SgdOptions,
)

Array = NDArray[np.float64]


class AdamReference:
    """Reference of Adam, AdamW and AMSGrad; ``decays`` has one weight decay per tensor."""

    def __init__(
        self, parameters: Sequence[ArrayLike], options: AdamFamilyOptions, decays: Sequence[float]
    ) -> None:
        self.parameters = [np.array(tensor, dtype=np.float64) for tensor in parameters]
        self.options, self.decays = options, decays
        self._reset()

    def step(self, gradients: Sequence[ArrayLike], lr: float, norm: float | None = None) -> None:
        """Update θ ← θ − lr m̂ / (√v̂ + ε) with m̂ = m / (1 − β1ᵗ), v̂ = v / (1 − β2ᵗ).

        Weight decay comes first: θ ← θ − lr λ θ if decoupled, g ← g + λ θ if not.
        """
        self.t += 1
        for k, gradient in enumerate(gradients):
            decay = self.decays[k] * self.parameters[k]
            if self.options.decoupled:
                self.parameters[k] -= lr * decay
            self._move(k, np.asarray(gradient) + decay * (not self.options.decoupled), lr)

    def _move(self, k: int, g: Array, lr: float, damping: tuple[float, float] = (1.0, 1.0)) -> None:
        o = self.options
        self.m[k] = o.beta1 * damping[0] * self.m[k] + (1 - o.beta1) * g
        self.v[k] = o.beta2 * damping[1] * self.v[k] + (1 - o.beta2) * g * g
        self.v_max[k] = np.maximum(self.v_max[k], self.v[k])
        m_hat = self.m[k] / (1 - o.beta1**self.t)
        v_hat = (self.v_max if o.amsgrad else self.v)[k] / (1 - o.beta2**self.t)
        self.parameters[k] -= lr * m_hat / (np.sqrt(v_hat) + o.eps)

    def _reset(self) -> None:
        self.m, self.v, self.v_max = ([np.zeros_like(p) for p in self.parameters] for _ in range(3))
        self.t = 0

    def forget(self, k: int, i: int) -> None:
        """Zero the state of element ``i`` of tensor ``k``, as pruning does."""
        self.m[k][i] = self.v[k][i] = self.v_max[k][i] = 0.0


class AdamwspamReference(AdamReference):
    """Reference of AdamW with SPAM."""

    options: AdamwspamOptions

    def __init__(
        self, parameters: Sequence[ArrayLike], options: AdamwspamOptions, decays: Sequence[float]
    ) -> None:
        super().__init__(parameters, options, decays)
        self.norms: list[float] = []
        self.n = 0
        self.spikes: list[int] = []
        # Step, tensor and element.
        self.clipped: list[tuple[int, int, int]] = []

    def step(self, gradients: Sequence[ArrayLike], lr: float, norm: float | None = None) -> None:
        """Apply the five parts of a step as listed in the docstring of ``lib.optim.spam``."""
        o = self.options
        self.n += 1
        if self.n > 1 and (self.n - 1) % o.interval == 0:
            self._reset()
        self.t += 1
        arrays = [np.asarray(gradient) for gradient in gradients]
        if norm is None:
            norm = math.sqrt(sum(float((g * g).sum()) for g in arrays))
        damping = (1.0, 1.0)
        if self._is_spike(norm):
            self.spikes.append(self.n)
            damping = (o.moment_damping, o.variance_damping)
        if self.n > o.interval and self.t < o.reset_warmup_steps:
            lr *= 0.5 * (1 - math.cos(math.pi * self.t / o.reset_warmup_steps))
        for k, g in enumerate(arrays):
            self.parameters[k] *= 1 - lr * self.decays[k]
            self._move(k, self._clip(k, g), lr, damping)

    def _is_spike(self, norm: float) -> bool:
        window = self.norms[-self.options.spike_window :]
        self.norms.append(norm)
        if len(window) < self.options.spike_window:
            return False
        return norm > float(np.mean(window) + self.options.spike_threshold * np.std(window))

    def _clip(self, k: int, g: Array) -> Array:
        limit = np.sqrt(self.options.theta * self.v[k])
        beyond = (limit > 0) & (np.abs(g) > limit) & (self.t >= self.options.clip_delay)
        self.clipped += [(self.n, k, int(i)) for i in np.flatnonzero(beyond)]
        return np.where(beyond, np.copysign(limit, g), g)


class SgdReference:
    """Reference of SGD with momentum."""

    def __init__(
        self, parameters: Sequence[ArrayLike], options: SgdOptions, decays: Sequence[float]
    ) -> None:
        self.parameters = [np.array(tensor, dtype=np.float64) for tensor in parameters]
        self.options, self.decays = options, decays
        self.buffers: list[Array] = []

    def step(self, gradients: Sequence[ArrayLike], lr: float, norm: float | None = None) -> None:
        """Update g ← g + λθ; b ← μ b + (1 − d) g (b = g at first); θ ← θ − lr (b, or g + μ b)."""
        o = self.options
        decayed = [
            np.asarray(gradient) + decay * parameter
            for gradient, decay, parameter in zip(
                gradients, self.decays, self.parameters, strict=True
            )
        ]
        before = self.buffers
        self.buffers = [g.copy() for g in decayed]
        if before:
            self.buffers = [
                o.momentum * buffer + (1 - o.dampening) * g
                for buffer, g in zip(before, decayed, strict=True)
            ]
        for parameter, buffer, g in zip(self.parameters, self.buffers, decayed, strict=True):
            update = g + o.momentum * buffer if o.nesterov else buffer
            parameter -= lr * (update if o.momentum else g)

    def forget(self, k: int, i: int) -> None:
        """Zero the state of element ``i`` of tensor ``k``, as pruning does."""
        self.buffers[k][i] = 0.0


OptimizerReference = SgdReference | AdamReference
REFERENCES: dict[
    type[Any], Callable[[Sequence[ArrayLike], Any, Sequence[float]], OptimizerReference]
] = {
    SgdOptions: SgdReference,
    AdamOptions: AdamReference,
    AdamwOptions: AdamReference,
    AdamwadvOptions: AdamReference,
    AdamwspamOptions: AdamwspamReference,
}


def optimizer_reference(
    options: OptimizerOptions, parameters: Sequence[ArrayLike], decays: Sequence[float]
) -> OptimizerReference:
    """Return the reference of an optimizer of flat ``parameters``, with a weight decay for each."""
    return REFERENCES[type(options.rule)](parameters, options.rule, decays)
