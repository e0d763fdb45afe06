"""One optimizer step: forward and backward of every micro-batch, clip, update, prune.

Shape suffixes: B micro-batch, T tokens.
"""

import torch
from torch import Tensor, nn

from gpt2.training.finite import anomaly_detection, require_finite
from gpt2.training.oom import DoesNotFit, prove_room
from gpt2.training.passes import Begun, Measured, MicroBatch, forward_backward, on_device
from gpt2.training.session import Session
from lib.errors import Problem
from lib.machine.setup import autocast


def optimizer_step(session: Session, micro_batches: list[MicroBatch], lr: float) -> Measured:
    """Run one optimizer step and return its metrics, still on the device.

    Raises NumericsError if loss or gradients are non-finite: with CHECK_NUMERICS before the update,
    otherwise when the log reads them, because reading here would stall a GPU. Raises DoesNotFit if
    memory runs out and OOM_FALLBACK is on. Both errors leave weights and states unchanged.
    """
    begun = Begun.now(session, micro_batches, lr)
    parameters = list(session.model.parameters())
    loss = _compute_gradients(session, begun)
    session.scaler.unscale_(session.optimizer)
    session.pruner.mask_gradients()
    norms = torch.stack(torch._foreach_norm(_gradients_or_zeros(parameters)))
    measured = Measured(loss, norms, torch.linalg.vector_norm(norms))
    if session.config.numerics.due(session.iteration + 1):
        require_finite(session, measured, session.iteration + 1, begun)
    session.pruner.observe(measured.gradient_norm)
    if session.config.train.grad_clip > 0.0:
        torch.nn.utils.clip_grads_with_norm_(
            parameters, session.config.train.grad_clip, measured.gradient_norm
        )
    for group in session.optimizer.param_groups:
        group["lr"] = lr
    session.scaler.step(session.optimizer, gradient_norm=measured.gradient_norm)
    session.scaler.update()
    session.optimizer.zero_grad(set_to_none=True)
    return measured


def _compute_gradients(session: Session, begun: Begun) -> Tensor:
    """Run forward and backward passes and return the loss.

    Rolls back and raises DoesNotFit if memory runs out and a fallback is possible.
    """
    prove_room(session, begun)
    try:
        with anomaly_detection(session):
            return _backward(session, begun.micro_batches)
    except torch.OutOfMemoryError as error:
        # Other ranks may be in the middle of a collective operation, which cannot be rolled back.
        if not session.config.train.oom_fallback or session.group.size > 1:
            raise
        cause = str(error).splitlines()[0]
    # Outside the except block, so that no traceback keeps the step's tensors alive.
    begun.undo(session)
    raise DoesNotFit(Problem(cause, code="run.out-of-memory"))


def _backward(session: Session, micro_batches: list[MicroBatch]) -> Tensor:
    """Accumulate gradients of the mean loss over all micro-batches, and return that loss."""
    share = 1.0 / len(micro_batches)
    total = torch.zeros((), device=session.device)
    # One autocast context for all micro-batches, so that weights are cast once per step.
    with autocast(session.config.machine):
        for i, (x_BT, y_BT) in enumerate(on_device(session, micro_batches), 1):
            total += forward_backward(session, x_BT, y_BT, share, i == len(micro_batches))
    return session.group.add(total) / session.group.size


def _gradients_or_zeros(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradient of each parameter; zero if the loss does not depend on it."""
    return [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
