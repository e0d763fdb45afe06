"""AdamW as the paper's algorithm 2 states it, one number at a time."""

from lib.optim.adam.reference import AdamReference


class AdamwReference(AdamReference):
    """Adam's loop, with the decay that its options decouple."""
