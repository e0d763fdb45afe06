"""AdamWAdv: Adam whose options decouple the decay and ask for AMSGrad."""

from lib.optim.adamw.module import Adamw


class Adamwadv(Adamw):
    """AdamW with AMSGrad, by the same kernel."""
