"""One optimizer step: forward and backward of every micro-batch, clip, update, prune.

B micro-batch, T tokens.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gpt2.training.session import Session
from lib.errors import Problem, RunError
from lib.machine.setup import autocast

MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Measured:
    """What a step measured, still on the device: reading it makes the host wait for the GPU."""

    # Mean over the tokens of the global batch, in nats.
    loss: Tensor
    # 2-norm of each parameter's gradient before clipping, in the model's order.
    gradient_norms: Tensor
    gradient_norm: Tensor


def optimizer_step(session: Session, micro_batches: list[MicroBatch], lr: float) -> Measured:
    """Move the weights once. RunError names the first bad tensor where a number is not finite.

    On a CPU that is found before the update; on a GPU when the numbers are read, because asking
    now would stall it.
    """
    parameters = list(session.model.parameters())
    loss = _backward(session, micro_batches)
    session.scaler.unscale_(session.optimizer)
    session.pruner.mask_gradients()
    norms = torch.stack(torch._foreach_norm(_gradients(parameters)))
    measured = Measured(loss, norms, torch.linalg.vector_norm(norms))
    if session.device.type == "cpu":
        require_finite(session, measured, session.iteration + 1)
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


def require_finite(session: Session, measured: Measured, iteration: int) -> None:
    """RunError unless loss and gradients of ``iteration`` are finite.

    fp16 gradients overflow now and then by design: the scaler skips such a step by itself.
    """
    loss = measured.loss.item()
    norm = measured.gradient_norm.item()
    if not math.isfinite(loss):
        what = f"loss is {_word(loss)}"
    elif not math.isfinite(norm) and not session.scaler.is_enabled():
        what = f"gradient norm is {_word(norm)}"
    else:
        return
    culprit = first_bad_tensor(session.model, measured)
    raise RunError(
        Problem(
            f"{what} at it {iteration}, first bad tensor {culprit}",
            str(session.run.logs),
            "try a lower LEARNING_RATE, a longer WARMUP_STEPS or GRAD_CLIP=1.0",
        )
    )


def first_bad_tensor(model: nn.Module, measured: Measured) -> str:
    """The first weight that is not finite, else the first such gradient, in the model's order."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return name
    names = [name for name, _ in model.named_parameters()]
    for name, norm in zip(names, measured.gradient_norms.tolist(), strict=True):
        if not math.isfinite(norm):
            return f"gradient of {name}"
    return "none of the weights and gradients: the model's output"


def _backward(session: Session, micro_batches: list[MicroBatch]) -> Tensor:
    """Accumulate gradients of the mean over all micro-batches, which are of equal size."""
    share = 1.0 / len(micro_batches)
    total = torch.zeros((), device=session.device)
    # One context around all of them: weights are cast once for the step, not once a micro-batch.
    with autocast(session.config.machine):
        for i, (x_BT, y_BT) in enumerate(_on_device(micro_batches, session.device), 1):
            with session.group.exchange(session.forward, now=i == len(micro_batches)):
                loss = session.forward(x_BT, y_BT) * share
                # Gradients take the types of the forward pass by themselves.
                with torch.autocast(session.device.type, enabled=False):
                    session.scaler.scale(loss).backward()
            total += loss.detach()
    return session.group.add(total) / session.group.size


def _on_device(batches: list[MicroBatch], device: torch.device) -> Iterable[MicroBatch]:
    """Copies from page-locked memory overlap with the GPU's work."""
    for x_BT, y_BT in batches:
        yield x_BT.to(device, non_blocking=True), y_BT.to(device, non_blocking=True)


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """One for each parameter; zero where the loss does not depend on it."""
    return [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]


def _word(number: float) -> str:
    return "NaN" if math.isnan(number) else "infinite"
