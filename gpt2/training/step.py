"""One optimizer step: forward and backward of every micro-batch, clip, update, prune.

B micro-batch, T tokens.
"""

import torch
from torch import Tensor, nn

from gpt2.training.finite import anomaly_detection, require_finite
from gpt2.training.oom import DoesNotFit, prove_room
from gpt2.training.passes import Begun, Measured, MicroBatch, forward_backward, on_device
from gpt2.training.session import Session
from lib.machine.setup import autocast


def optimizer_step(session: Session, micro_batches: list[MicroBatch], lr: float) -> Measured:
    """Move the weights once.

    NumericsError where a number is not finite: with CHECK_NUMERICS before the update, else when the
    numbers are read, because asking now would stall a GPU. DoesNotFit where memory ran out and
    OOM_FALLBACK is on. After either, nothing has changed.
    """
    begun = Begun.now(session, micro_batches, lr)
    parameters = list(session.model.parameters())
    loss = _gradients(session, begun)
    session.scaler.unscale_(session.optimizer)
    session.pruner.mask_gradients()
    norms = torch.stack(torch._foreach_norm(_found(parameters)))
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


def _gradients(session: Session, begun: Begun) -> Tensor:
    """The passes, taken back where they do not fit and that can be answered."""
    prove_room(session, begun)
    try:
        with anomaly_detection(session):
            return _backward(session, begun.micro_batches)
    except torch.OutOfMemoryError as error:
        # Other ranks may be in the middle of an exchange, from which there is no way back.
        if not session.config.train.oom_fallback or session.group.size > 1:
            raise
        cause = str(error).splitlines()[0]
    # Here, where no traceback holds on to the step's tensors.
    begun.undo(session)
    raise DoesNotFit(cause)


def _backward(session: Session, micro_batches: list[MicroBatch]) -> Tensor:
    """Accumulate gradients of the mean over all micro-batches, which are of equal size."""
    share = 1.0 / len(micro_batches)
    total = torch.zeros((), device=session.device)
    # One context around all of them: weights are cast once for the step, not once a micro-batch.
    with autocast(session.config.machine):
        for i, (x_BT, y_BT) in enumerate(on_device(session, micro_batches), 1):
            total += forward_backward(session, x_BT, y_BT, share, i == len(micro_batches))
    return session.group.add(total) / session.group.size


def _found(parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradient of each parameter; zero where the loss does not depend on it."""
    return [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
