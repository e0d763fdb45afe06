"""Adam, AdamW and AMSGrad as in their papers' algorithms, in scalar Python float64."""

import math

from lib.optim.adam.options import AdamFamilyOptions


class AdamReference:
    """Reference of Adam, AdamW and AMSGrad.

    ``parameters``: one list of floats per tensor, updated in place; ``decays``: one per tensor.
    """

    def __init__(
        self, parameters: list[list[float]], options: AdamFamilyOptions, decays: list[float]
    ) -> None:
        self.parameters = parameters
        self.options = options
        self.decays = decays
        self.m = [[0.0] * len(tensor) for tensor in parameters]
        self.v = [[0.0] * len(tensor) for tensor in parameters]
        self.v_max = [[0.0] * len(tensor) for tensor in parameters]
        self.t = 0

    def step(self, gradients: list[list[float]], lr: float) -> None:
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
                self.m[k][i] = o.beta1 * self.m[k][i] + (1 - o.beta1) * g
                self.v[k][i] = o.beta2 * self.v[k][i] + (1 - o.beta2) * g * g
                self.v_max[k][i] = max(self.v_max[k][i], self.v[k][i])
                v = self.v_max[k][i] if o.amsgrad else self.v[k][i]
                m_hat = self.m[k][i] / (1 - o.beta1**self.t)
                v_hat = v / (1 - o.beta2**self.t)
                self.parameters[k][i] = weight - lr * m_hat / (math.sqrt(v_hat) + o.eps)
