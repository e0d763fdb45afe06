"""Optimizers, the learning rate schedule and parameter groups."""

from lib.registry import Registry

OPTIMIZERS = Registry(
    "optimizer",
    choice="OPTIMIZER",
    parts={"adamw": "lib.optim.adamw", "adamwspam": "lib.optim.adamwspam"},
)
