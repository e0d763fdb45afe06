"""Pruners: select the weights that are set to zero during training, and when."""

from lib.registry import Registry

PRUNERS = Registry(
    "pruner",
    choice="PRUNING",
    suffix="Pruner",
    parts={
        "none": "lib.pruning.none",
        "magnitude": "lib.pruning.magnitude",
        "movement": "lib.pruning.movement",
        "state": "lib.pruning.state",
    },
)
