"""SGD with momentum, in scalar Python float64."""

from lib.optim.sgd.options import SgdOptions


class SgdReference:
    """Reference of SGD with momentum.

    ``parameters``: one list of floats per tensor, updated in place; ``decays``: one per tensor.
    """

    def __init__(
        self, parameters: list[list[float]], options: SgdOptions, decays: list[float]
    ) -> None:
        self.parameters = parameters
        self.options = options
        self.decays = decays
        self.buffers = [[0.0] * len(tensor) for tensor in parameters]
        self.t = 0

    def step(self, gradients: list[list[float]], lr: float) -> None:
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
