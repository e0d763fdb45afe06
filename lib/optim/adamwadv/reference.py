"""AdamW with AMSGrad, one number at a time."""

from lib.optim.adam.reference import AdamReference


class AdamwadvReference(AdamReference):
    """Adam's loop, with the decay and the maximum that its options ask for."""
