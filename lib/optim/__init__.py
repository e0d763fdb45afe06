"""Optimizers, learning-rate schedules and parameter groups."""

from lib.registry import Registry

# Base optimizers of AdamWPrune: their state contains exp_avg and exp_avg_sq.
_ADAM_FAMILY = {
    "adam": "lib.optim.adam",
    "adamw": "lib.optim.adamw",
    "adamwadv": "lib.optim.adamwadv",
    "adamwspam": "lib.optim.adamwspam",
}
BASES = Registry("base optimizer", choice="ADAMWPRUNE_BASE", parts=_ADAM_FAMILY)
OPTIMIZERS = Registry(
    "optimizer",
    choice="OPTIMIZER",
    parts={"sgd": "lib.optim.sgd", **_ADAM_FAMILY, "adamwprune": "lib.optim.adamwprune"},
)
