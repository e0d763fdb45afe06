"""AdamW: Adam with decoupled weight decay, set by its options."""

from lib.optim.adam.module import Adam


class Adamw(Adam):
    """Adam with decoupled weight decay, on the same kernel."""
