"""AdamWAdv: AdamW with AMSGrad, set by its options."""

from lib.optim.adamw.module import Adamw


class Adamwadv(Adamw):
    """AdamW with AMSGrad, on the same kernel."""
