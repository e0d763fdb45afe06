"""What a step is made of before its update: micro-batches, their passes, what they measure.

B micro-batch, b a part of it, T tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gpt2.training.session import Session

MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Measured:
    """What a step measured, still on the device: reading it makes the host wait for the GPU."""

    # Mean over the tokens of the global batch, in nats.
    loss: Tensor
    # 2-norm of each parameter's gradient before clipping, in the model's order.
    gradient_norms: Tensor
    gradient_norm: Tensor


@dataclass(frozen=True)
class Begun:
    """What a step begins with on this rank: enough to make it again."""

    micro_batches: list[MicroBatch]
    lr: float
    # States of the generators that dropout draws from.
    rng: dict[str, Tensor]

    @classmethod
    def now(cls, session: Session, micro_batches: list[MicroBatch], lr: float) -> Self:
        """The step that is about to be made."""
        rng = {"torch": torch.get_rng_state()}
        if session.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(session.device)
        return cls(micro_batches, lr, rng)

    def undo(self, session: Session) -> None:
        """Take the passes back: no gradients, and dropout draws what it drew. Weights are untouched."""
        session.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(self.rng["torch"])
        if "cuda" in self.rng:
            torch.cuda.set_rng_state(self.rng["cuda"], session.device)


def divided(batches: list[MicroBatch], size: int) -> list[MicroBatch]:
    """The same sequences in the same order, ``size`` in each micro-batch; it divides each."""
    return [
        (x_bT, y_bT)
        for x_BT, y_BT in batches
        for x_bT, y_bT in zip(x_BT.split(size), y_BT.split(size), strict=True)
    ]


def on_device(session: Session, batches: list[MicroBatch]) -> Iterable[MicroBatch]:
    """Copies from page-locked memory overlap with the GPU's work."""
    for x_BT, y_BT in batches:
        yield (
            x_BT.to(session.device, non_blocking=True),
            y_BT.to(session.device, non_blocking=True),
        )


def forward_backward(
    session: Session, x_BT: Tensor, y_BT: Tensor, share: float, exchange: bool
) -> Tensor:
    """Add the gradients of ``share`` of a micro-batch's loss; that part of the loss, detached.

    Inside the forward pass's autocast context. ``exchange`` lets the ranks share what has added up.
    """
    with session.group.exchange(session.forward, now=exchange):
        loss = session.forward(x_BT, y_BT) * share
        # Gradients take the types of the forward pass by themselves.
        with torch.autocast(session.device.type, enabled=False):
            session.scaler.scale(loss).backward()
    return loss.detach()
