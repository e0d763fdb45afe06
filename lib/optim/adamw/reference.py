"""AdamW as in the paper's algorithm 2, in scalar Python float64."""

from lib.optim.adam.reference import AdamReference


class AdamwReference(AdamReference):
    """Reference of AdamW: Adam's loop with decoupled weight decay."""
