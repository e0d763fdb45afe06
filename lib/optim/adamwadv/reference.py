"""AdamW with AMSGrad, in scalar Python float64."""

from lib.optim.adam.reference import AdamReference


class AdamwadvReference(AdamReference):
    """Reference of AdamWAdv: Adam's loop with decoupled weight decay and AMSGrad."""
