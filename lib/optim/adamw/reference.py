"""AdamW as the paper's algorithm 2 states it, one number at a time."""

import math

from lib.optim.adamw.options import AdamwOptions


class AdamwReference:
    """``parameters``: one list of numbers per tensor, updated in place; ``decays``: one per tensor."""

    def __init__(
        self, parameters: list[list[float]], options: AdamwOptions, decays: list[float]
    ) -> None:
        self.parameters = parameters
        self.options = options
        self.decays = decays
        self.m = [[0.0] * len(tensor) for tensor in parameters]
        self.v = [[0.0] * len(tensor) for tensor in parameters]
        self.t = 0

    def step(self, gradients: list[list[float]], lr: float) -> None:
        """θ ← θ − lr λ θ − lr m̂ / (√v̂ + ε) with m̂ = m / (1 − β1ᵗ), v̂ = v / (1 − β2ᵗ)."""
        o = self.options
        self.t += 1
        for k, gradient in enumerate(gradients):
            for i, g in enumerate(gradient):
                self.m[k][i] = o.beta1 * self.m[k][i] + (1 - o.beta1) * g
                self.v[k][i] = o.beta2 * self.v[k][i] + (1 - o.beta2) * g * g
                m_hat = self.m[k][i] / (1 - o.beta1**self.t)
                v_hat = self.v[k][i] / (1 - o.beta2**self.t)
                weight = self.parameters[k][i]
                weight -= lr * self.decays[k] * weight
                self.parameters[k][i] = weight - lr * m_hat / (math.sqrt(v_hat) + o.eps)
