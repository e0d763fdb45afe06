"""Pruners: select the weights that are set to zero during training, and when."""

from lib.config.registry import Registry

PRUNERS = Registry(
    "pruner",
    choice="PRUNING",
    suffix="Pruner",
    parts={
        "none": ("lib.pruning.options", "lib.pruning.pruners", "lib.pruning.reference"),
        "magnitude": ("lib.pruning.options", "lib.pruning.pruners", "lib.pruning.reference"),
        "movement": ("lib.pruning.options", "lib.pruning.pruners", "lib.pruning.reference"),
        "state": ("lib.pruning.options", "lib.pruning.pruners", "lib.pruning.reference"),
    },
)
