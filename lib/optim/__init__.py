"""Optimizers, learning-rate schedules and parameter groups."""

from lib.config.registry import Registry

# Base optimizers of AdamWPrune: their state contains exp_avg and exp_avg_sq.
_ADAM_FAMILY = {
    "adam": ("lib.optim.options", "lib.optim.optimizers", "lib.optim.reference"),
    "adamw": ("lib.optim.options", "lib.optim.optimizers", "lib.optim.reference"),
    "adamwadv": ("lib.optim.options", "lib.optim.optimizers", "lib.optim.reference"),
    "adamwspam": ("lib.optim.options", "lib.optim.spam", "lib.optim.reference"),
}
ADAMWPRUNE_BASES = Registry("base optimizer", choice="ADAMWPRUNE_BASE", parts=_ADAM_FAMILY)
OPTIMIZERS = Registry(
    "optimizer",
    choice="OPTIMIZER",
    parts={
        "sgd": ("lib.optim.options", "lib.optim.optimizers", "lib.optim.reference"),
        **_ADAM_FAMILY,
        "adamwprune": ("lib.optim.options", "lib.optim.optimizers", "lib.optim.reference"),
    },
)
