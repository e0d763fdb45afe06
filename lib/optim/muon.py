"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) on torch's fused AdamW.

A hidden matrix W (m × n) is updated with its gradient G, momentum M (0 at first) and the Muon rate η:

    M ← μ M + (1−μ) G                    D = μ M + (1−μ) G with Nesterov's momentum, M without
    X ← D / max(‖D‖, 1e-7)               Frobenius norm
    X ← a X + b (XXᵀ) X + c (XXᵀ)² X     Newton-Schulz, a number of times
    W ← (1 − η λ) W − η s X              s by the shape of W

Each iteration maps every singular value x of X to a x + b x³ + c x⁵: five bring nearly all of them to
between 0.7 and 1.2, so X is close to the nearest semi-orthogonal matrix U Vᵀ of D = U Σ Vᵀ. A weight
that stacks several matrices (``StackedLinear``) is updated matrix by matrix.

torch.optim.Muon computes X in bfloat16, two-dimensional and unstacked: its updates differ from the
formula by 2 %, those below by 1e-5 with weights in float32, and by rounding in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.env.sharded import placed_like, whole
from lib.errors import ConfigError, Problem
from lib.optim.optimizers import Adam, ParameterGroup
from lib.optim.options import MuonOptions

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


class Muon(Adam):
    """Muon for the groups with ``rows``, AdamW for the others; its state is a momentum per matrix.

    The learning rate of all groups is AdamW's; Muon's follows it in the ratio of their peaks.
    """

    # Elements that are orthogonalized at once: each chunk is a few kernel launches on a GPU. The
    # result does not depend on it.
    chunk_elements = 1 << 22

    def __init__(self, groups: list[ParameterGroup], options: MuonOptions, lr: float) -> None:
        if not any("rows" in group for group in groups):
            what = "OPTIMIZER_MUON: a model without hidden matrices to train (expected 1, got 0)"
            raise ConfigError(Problem(what, next="set OPTIMIZER_ADAMW=y", code="config.conflict"))
        super().__init__(groups, options, lr)
        # With AMP support, torch's GradScaler would call step() on an overflow and let the fused
        # kernel skip it. Without, it checks for an overflow first and does not call step().
        self._step_supports_amp_scaling = False
        self._options = options
        self._ratio = options.learning_rate / lr if lr else 0.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Adam's looks for a step count of every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch declares overloads by the type of closure
        self,
        closure: Callable[[], float] | None = None,
        *,
        gradient_norm: Tensor | None = None,
    ) -> None:
        assert closure is None, "Muon reads the gradients before AdamW would call a closure"
        gradients: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            if "rows" in group:
                given = {p: p.grad for p in group["params"] if p.grad is not None}
                for parameters in self._chunks(list(given)):
                    self._update(parameters, group)
                gradients |= given
        # AdamW ignores parameters without a gradient.
        for parameter in gradients:
            parameter.grad = None
        super().step()
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def statistics(self) -> dict[str, float]:
        """Return Muon's learning rate of the last step."""
        return {"muon_learning_rate": float(self.param_groups[0]["lr"]) * self._ratio}

    def _chunks(self, parameters: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yield the parameters, which have one shape, in lists of ``chunk_elements`` at most."""
        count = max(1, self.chunk_elements // parameters[0].numel()) if parameters else 1
        for first in range(0, len(parameters), count):
            yield parameters[first : first + count]

    def _update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of one shape; a sharded one is gathered, and updated on every rank."""
        options, rate = self._options, group["lr"] * self._ratio
        directions = []
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"].lerp_(gradient, 1.0 - options.muon_momentum)
            if options.muon_nesterov:
                directions.append(whole(gradient.lerp(momentum, options.muon_momentum)))
            else:
                directions.append(whole(momentum))
        stacks = torch.stack(directions)
        for matrices in stacks.split(group["rows"], dim=-2):
            scale = options.scale_of(*matrices.shape[-2:])
            matrices.copy_(orthogonalized(matrices, options.steps) * scale)
        for parameter, update in zip(parameters, stacks, strict=True):
            parameter.mul_(1.0 - rate * group["weight_decay"])
            parameter.sub_(placed_like(update, parameter), alpha=rate)


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """Return X after ``steps`` iterations for each of the matrices in the last two dimensions."""
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    x = matrices / norms.clamp(min=_EPS)
    is_tall = x.size(-2) > x.size(-1)
    # The smaller of the two products.
    x = x.mT if is_tall else x
    for _ in range(steps):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * (square @ square)) @ x
    return x.mT if is_tall else x
