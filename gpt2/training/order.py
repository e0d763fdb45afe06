"""Digest of the data order: the sequences that all ranks consumed, step by step.

Shape suffixes: R ranks, S steps, B sequences of one rank and step.
"""

import torch
from torch import Tensor

from gpt2.data.sampler import NO_ORDER, next_order
from lib.machine.group import Group

# Steps buffered per rank before their offsets are gathered.
_STEPS_PER_EXCHANGE = 64


class DataOrder:
    """Running ``order_digest``, independent of the number of ranks and workers, and of resumes."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._digest = NO_ORDER
        # Offsets of this rank for each step that is not in the digest yet.
        self._pending: list[Tensor] = []
        self._offered = torch.empty(0)

    def offered(self, offsets_B: Tensor) -> None:
        """Store this rank's sequences of the next step; the step may be offered again."""
        self._offered = offsets_B

    def consumed(self) -> None:
        """Count the sequences offered last as consumed. Must be called on every rank."""
        self._pending.append(self._offered)
        if len(self._pending) == _STEPS_PER_EXCHANGE or self._group.size == 1:
            self._exchange()

    def state_dict(self) -> str:
        """Return the digest of all steps so far. Must be called on every rank."""
        self._exchange()
        return self._digest

    def load_state_dict(self, digest: str) -> None:
        """Continue after the steps of ``digest``."""
        self._digest = digest
        self._pending.clear()

    @property
    def digest(self) -> str:
        """Return the last result of ``state_dict``, without communication."""
        return self._digest

    def _exchange(self) -> None:
        if not self._pending:
            return
        offsets_RSB = self._group.gather(torch.stack(self._pending))
        self._pending.clear()
        for step in offsets_RSB.transpose(0, 1):
            self._digest = next_order(self._digest, step.flatten().numpy())
