"""AdamW: Adam whose options decouple the decay."""

from lib.optim.adam.module import Adam


class Adamw(Adam):
    """Adam with decoupled weight decay, by the same kernel."""
