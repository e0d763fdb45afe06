"""Parts of a step before the update: micro-batches, forward and backward passes, step metrics.

Shape suffixes: B micro-batch, b part of a micro-batch, T tokens.
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
    """Metrics of a step, still on the device; reading them synchronizes with the GPU."""

    # Mean over the tokens of the global batch, in nats.
    loss: Tensor
    # 2-norm of each parameter's gradient before clipping, in the order of model.parameters().
    gradient_norms: Tensor
    gradient_norm: Tensor


@dataclass(frozen=True)
class Begun:
    """Snapshot of a step's inputs on this rank, sufficient to repeat the step."""

    micro_batches: list[MicroBatch]
    lr: float
    # States of the generators used by dropout.
    rng: dict[str, Tensor]

    @classmethod
    def now(cls, session: Session, micro_batches: list[MicroBatch], lr: float) -> Self:
        """Return the snapshot of the step about to be run."""
        rng = {"torch": torch.get_rng_state()}
        if session.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(session.device)
        return cls(micro_batches, lr, rng)

    def undo(self, session: Session) -> None:
        """Roll back the passes: clear gradients and restore generators. Weights are unchanged."""
        session.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(self.rng["torch"])
        if "cuda" in self.rng:
            torch.cuda.set_rng_state(self.rng["cuda"], session.device)


def divided(batches: list[MicroBatch], size: int) -> list[MicroBatch]:
    """Split micro-batches into ones of ``size`` sequences, a divisor of theirs, in equal order."""
    return [
        (x_bT, y_bT)
        for x_BT, y_BT in batches
        for x_bT, y_bT in zip(x_BT.split(size), y_BT.split(size), strict=True)
    ]


def on_device(session: Session, batches: list[MicroBatch]) -> Iterable[MicroBatch]:
    """Yield micro-batches on the device; copies from page-locked memory are asynchronous."""
    for x_BT, y_BT in batches:
        yield (
            x_BT.to(session.device, non_blocking=True),
            y_BT.to(session.device, non_blocking=True),
        )


def forward_backward(
    session: Session, x_BT: Tensor, y_BT: Tensor, share: float, exchange: bool
) -> Tensor:
    """Accumulate gradients of a micro-batch's loss times ``share``; return that product, detached.

    Call inside the autocast context of the forward pass. ``exchange`` makes the ranks all-reduce
    the accumulated gradients.
    """
    with session.group.exchange(session.forward, now=exchange):
        loss = session.forward(x_BT, y_BT) * share
        # Backward uses the dtypes of the forward pass without autocast.
        with torch.autocast(session.device.type, enabled=False):
            session.scaler.scale(loss).backward()
    return loss.detach()
