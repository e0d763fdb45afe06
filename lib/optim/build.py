"""The optimizer of each class of options."""

from collections.abc import Callable
from typing import Any

from lib.optim import options as o
from lib.optim.muon import Muon
from lib.optim.optimizers import Adam, Optimizer, ParameterGroup, Sgd
from lib.optim.spam import Adamwspam

# Called with the parameter groups, the options and a learning rate.
MODULES: dict[type[Any], Callable[[list[ParameterGroup], Any, float], Optimizer]] = {
    o.SgdOptions: Sgd,
    o.AdamOptions: Adam,
    o.AdamwOptions: Adam,
    o.AdamwadvOptions: Adam,
    o.AdamwspamOptions: Adamwspam,
    o.MuonOptions: Muon,
}


def build_optimizer(
    options: o.OptimizerOptions, groups: list[ParameterGroup], lr: float
) -> Optimizer:
    """Return the optimizer of ``groups`` at the schedule's peak ``lr``, until another rate is set."""
    return MODULES[type(options.rule)](groups, options.rule, lr)
