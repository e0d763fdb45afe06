"""Optimizers as in their papers' algorithms, in numpy's float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lib.optim.options import (
    AdamFamilyOptions,
    AdamOptions,
    AdamwadvOptions,
    AdamwOptions,
    AdamwspamOptions,
    MuonOptions,
    OptimizerOptions,
    SgdOptions,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class OptimizedTensor:
    """A tensor as a flat list: its values, its weight decay, and the matrices that it stacks.

    ``matrices`` are the shapes of hidden matrices in the order of the values, () of any other tensor.
    """

    values: ArrayLike
    weight_decay: float
    matrices: Sequence[tuple[int, int]] = ()


class OptimizerReference:
    """Base class of references: an optimizer of ``tensors`` at a schedule with the peak ``peak``."""

    def __init__(self, tensors: Sequence[OptimizedTensor], options: Any, peak: float) -> None:
        self.parameters = [np.array(tensor.values, dtype=np.float64) for tensor in tensors]
        self.decays = [tensor.weight_decay for tensor in tensors]
        self.matrices = [tensor.matrices for tensor in tensors]
        self.options, self.peak = options, peak

    def step(self, gradients: Sequence[ArrayLike], lr: float, norm: float | None = None) -> None:
        """Update the parameters; ``norm`` is the gradient norm before clipping."""
        raise NotImplementedError

    def forget(self, k: int, i: int) -> None:
        """Zero the state of element ``i`` of tensor ``k``, as pruning does."""
        raise NotImplementedError


class AdamReference(OptimizerReference):
    """Reference of Adam, AdamW and AMSGrad."""

    options: AdamFamilyOptions

    def __init__(self, tensors: Sequence[OptimizedTensor], options: Any, peak: float) -> None:
        super().__init__(tensors, options, peak)
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
        self.m[k][i] = self.v[k][i] = self.v_max[k][i] = 0.0


class AdamwspamReference(AdamReference):
    """Reference of AdamW with SPAM."""

    options: AdamwspamOptions

    def __init__(self, tensors: Sequence[OptimizedTensor], options: Any, peak: float) -> None:
        super().__init__(tensors, options, peak)
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


class SgdReference(OptimizerReference):
    """Reference of SGD with momentum."""

    options: SgdOptions

    def __init__(self, tensors: Sequence[OptimizedTensor], options: Any, peak: float) -> None:
        super().__init__(tensors, options, peak)
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
        self.buffers[k][i] = 0.0


class MuonReference(AdamReference):
    """Reference of Muon, by singular values: W ← (1 − η λ) W − η s U p(Σ) Vᵀ; AdamW of the others."""

    options: MuonOptions

    def _reset(self) -> None:
        super()._reset()
        self.momenta = [np.zeros_like(p) for p in self.parameters]

    def step(self, gradients: Sequence[ArrayLike], lr: float, norm: float | None = None) -> None:
        o, before = self.options, [p.copy() for p in self.parameters]
        super().step(gradients, lr, norm)
        rate = o.learning_rate * lr / self.peak
        for k, (momentum, gradient) in enumerate(zip(self.momenta, gradients, strict=True)):
            if not self.matrices[k]:
                continue
            g = np.asarray(gradient)
            momentum += (1 - o.muon_momentum) * (g - momentum)
            direction = (
                o.muon_momentum * momentum + (1 - o.muon_momentum) * g
                if o.muon_nesterov
                else momentum
            )
            ends = np.cumsum([rows * columns for rows, columns in self.matrices[k]])
            parts = zip(np.split(direction, ends[:-1]), self.matrices[k], strict=True)
            update = np.concatenate([self._orthogonal(d.reshape(shape)) for d, shape in parts])
            self.parameters[k] = before[k] - rate * (self.decays[k] * before[k] + update)

    def _orthogonal(self, direction: Array) -> Array:
        """Return the flat update of one matrix, by a polynomial of its singular values."""
        left, values, right = np.linalg.svd(direction, full_matrices=False)
        values = values / max(math.sqrt(float((values**2).sum())), 1e-7)
        for _ in range(self.options.steps):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        rows, columns = direction.shape
        wide, tall = 0.2 * max(rows, columns) ** 0.5, max(1.0, rows / columns) ** 0.5
        scale = wide if self.options.scale == "rms" else tall
        return scale * ((left * values) @ right).flatten()

    def forget(self, k: int, i: int) -> None:
        super().forget(k, i)
        self.momenta[k][i] = 0.0


REFERENCES: dict[
    type[Any], Callable[[Sequence[OptimizedTensor], Any, float], OptimizerReference]
] = {
    SgdOptions: SgdReference,
    AdamOptions: AdamReference,
    AdamwOptions: AdamReference,
    AdamwadvOptions: AdamReference,
    AdamwspamOptions: AdamwspamReference,
    MuonOptions: MuonReference,
}


def optimizer_reference(
    options: OptimizerOptions, tensors: Sequence[OptimizedTensor], peak: float
) -> OptimizerReference:
    """Return the reference of an optimizer at a schedule with the peak ``peak``."""
    return REFERENCES[type(options.rule)](tensors, options.rule, peak)
