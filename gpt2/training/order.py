"""Which sequences training consumed, as one digest that every rank's part is in.

R ranks, S steps.
"""

import torch
from torch import Tensor

from gpt2.data.sampler import NO_ORDER, next_order
from lib.machine.group import Group

# Steps that ranks hold back between two exchanges.
_TOGETHER = 64


class DataOrder:
    """The running ``order_digest``; what it says does not depend on ranks, workers or resumes."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._digest = NO_ORDER
        # Of this rank, for each step that is not in the digest yet.
        self._pending: list[Tensor] = []
        self._offered = torch.empty(0)

    def offered(self, offsets_B: Tensor) -> None:
        """This rank's sequences of the next step, which may yet be offered another time."""
        self._offered = offsets_B

    def consumed(self) -> None:
        """The step was made with what was offered last. Every rank has to call it."""
        self._pending.append(self._offered)
        if len(self._pending) == _TOGETHER or self._group.size == 1:
            self._exchange()

    def state_dict(self) -> str:
        """The digest of all steps so far. Every rank has to call it."""
        self._exchange()
        return self._digest

    def load_state_dict(self, digest: str) -> None:
        """Go on behind the steps of ``digest``."""
        self._digest = digest
        self._pending.clear()

    @property
    def digest(self) -> str:
        """What ``state_dict`` said last; asks nobody."""
        return self._digest

    def _exchange(self) -> None:
        if not self._pending:
            return
        offsets_RSB = self._group.gather(torch.stack(self._pending))
        self._pending.clear()
        for step in offsets_RSB.transpose(0, 1):
            self._digest = next_order(self._digest, step.flatten().numpy())
