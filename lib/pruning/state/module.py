"""State pruning: scores from the weights and the moments of an Adam-like optimizer.

w is the weight, m and v are the optimizer's ``exp_avg`` and ``exp_avg_sq``, ε is 1e-8. The
published variants shift possibly negative scores until all are at least 0. A common offset changes
no ranking, and pruned weights are marked by −∞, so scores are not shifted here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lib.pruning.mask import MaskPruner
from lib.pruning.state.options import StateOptions

_EPS = 1e-8

Score = Callable[[Tensor, Tensor, Tensor], Tensor]


def _growing(w: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """Return −sign(w) m / (√v + ε): positive if the next step moves the weight away from zero."""
    return -w.sign() * m / (v.sqrt() + _EPS)


def _mobile(w: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """Return |w| √(|m| + ε)."""
    return w.abs() * (m.abs() + _EPS).sqrt()


SCORES: dict[str, Score] = {
    "bitter0": lambda w, m, v: (w * m).abs() * (w.abs() / (v.sqrt() + _EPS)),
    "bitter1": lambda w, m, v: w.abs(),
    "bitter2": lambda w, m, v: w.abs(),
    "bitter3": _mobile,
    "bitter4": _mobile,
    "bitter5": lambda w, m, v: _growing(w, m, v) + 0.1 * w.abs(),
    "bitter6": lambda w, m, v: _mobile(w, m, v) * m.abs() / (v + _EPS).sqrt(),
    "bitter7": lambda w, m, v: w.abs() * (v + _EPS).pow(0.25),
    "bitter8": _mobile,
    "bitter9": lambda w, m, v: _mobile(w, m, v) + 0.1 * _growing(w, m, v),
}


class StatePruner(MaskPruner):
    """Pruner that retains the weights with the highest scores of the configured variant."""

    _options: StateOptions

    def score(self, name: str, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the variant's score as float32; moments are 0 if there was no gradient yet."""
        parameter = self._parameters[name]
        w = parameter.detach().float()
        state = optimizer.state.get(parameter)
        if not state:
            m = v = torch.zeros_like(w)
        else:
            m, v = state["exp_avg"].float(), state["exp_avg_sq"].float()
            if self._options.variant == "bitter8":
                m = m / (1.0 - _beta1(optimizer, parameter) ** state["step"].clamp(min=1))
        return SCORES[self._options.variant](w, m, v)


def _beta1(optimizer: torch.optim.Optimizer, parameter: Tensor) -> float:
    """Return β1 of the parameter group that contains ``parameter``."""
    groups = optimizer.param_groups
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    return float(group["betas"][0])
