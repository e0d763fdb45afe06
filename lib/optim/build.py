"""The optimizer of each class of options."""

from collections.abc import Callable
from typing import Any

from lib.optim.optimizers import Adam, Optimizer, ParameterGroup, Sgd
from lib.optim.options import (
    AdamOptions,
    AdamwadvOptions,
    AdamwOptions,
    AdamwspamOptions,
    OptimizerOptions,
    SgdOptions,
)
from lib.optim.spam import Adamwspam

# Called with the parameter groups, the options and a learning rate.
MODULES: dict[type[Any], Callable[[list[ParameterGroup], Any, float], Optimizer]] = {
    SgdOptions: Sgd,
    AdamOptions: Adam,
    AdamwOptions: Adam,
    AdamwadvOptions: Adam,
    AdamwspamOptions: Adamwspam,
}


def build_optimizer(
    options: OptimizerOptions, groups: list[ParameterGroup], lr: float
) -> Optimizer:
    """Return the optimizer of ``groups`` with the learning rate ``lr`` until it is set."""
    rule = options.rule
    return MODULES[type(rule)](groups, rule, lr)
