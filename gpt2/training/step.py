"""One optimizer step: forward and backward of every micro-batch, clip, update, prune.

Shape suffixes: B micro-batch, T tokens.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.training.nonfinite import anomaly_detection, require_finite
from gpt2.training.session import (
    MicroBatch,
    StepMetrics,
    StepSnapshot,
    SupportsGradCheckpointing,
    TrainingSession,
    forward_backward,
    on_device,
)
from lib.env.gpu import peak_memory_bytes
from lib.env.machine import autocast
from lib.env.sharded import is_sharded, local, sum_over_shards
from lib.errors import Problem, RunError
from lib.units import format_size

# Fallbacks when a step runs out of memory: smaller micro-batches and gradient checkpointing, as
# configured.
#
# Every fallback keeps the sequences of a batch. Measures that would change the experiment are only
# logged. Shape suffixes: B micro-batch, T tokens.


# Further measures, and the reason why they are not applied.
UNSUPPORTED_FALLBACKS = {
    "shorter sequence": "would change the experiment",
    "smaller list": "applies to ranking only",
    "LoRA or QLoRA": "applies to fine-tuning only",
    "4-bit weights": "applies to fine-tuning only",
}
# With two micro-batches, gradients and activations are in memory at the same time.
_PROBED_MICRO_BATCHES = 2


class StepOutOfMemory(RunError):
    """Error of a step that ran out of memory and was rolled back on every rank."""


_CPU_ALLOCATOR = "DefaultCPUAllocator: "


@contextmanager
def cpu_memory_errors() -> Iterator[None]:
    """Raise torch.OutOfMemoryError if the memory of the CPU runs out, as torch does for a GPU."""
    try:
        yield
    except MemoryError as error:
        raise torch.OutOfMemoryError(f"out of memory: {error}") from error
    except RuntimeError as error:
        _, allocator, cause = str(error).partition(_CPU_ALLOCATOR)
        if not allocator:
            raise
        raise torch.OutOfMemoryError(cause) from error


def probe_memory(session: TrainingSession, begun: StepSnapshot) -> None:
    """Raise StepOutOfMemory on all ranks if the step runs out of memory on one of several ranks.

    A rank cannot roll back during a collective operation, so the passes of the first steps are run
    once before, without communication.
    """
    if (
        session.group.size == 1
        or not session.config.train.oom_fallback
        or not session.state.steps_to_probe
    ):
        return
    cause = ""
    try:
        with cpu_memory_errors(), autocast(session.config.machine):
            for x_BT, y_BT in on_device(session, begun.micro_batches[:_PROBED_MICRO_BATCHES]):
                forward_backward(session, x_BT, y_BT, 1.0, exchange=False)
    except torch.OutOfMemoryError as error:
        cause = str(error).splitlines()[0]
    begun.undo(session)
    if session.group.any(bool(cause)):
        what = cause or "out of memory on another rank"
        raise StepOutOfMemory(Problem(what, code="run.out-of-memory"))
    session.state.steps_to_probe -= 1


def apply_next_fallback(session: TrainingSession, cause: str) -> dict[str, Any]:
    """Apply the next fallback, log it and return its record. Raises RunError if none is left."""
    if session.device.type == "cuda":
        # Free the memory of the failed step, including reference cycles.
        gc.collect()
        torch.cuda.empty_cache()
    action, before, after = _next_fallback(session)
    record: dict[str, Any] = {
        "iteration": session.state.iteration + 1,
        "action": action,
        "from": before,
        "to": after,
        "peak_bytes": peak_memory_bytes(session.device),
    }
    session.apply_fallback(record)
    text = f"it {record['iteration']}: {action} {_format(before)} -> {_format(after)}"
    session.records.line("OOM", f"{text}; peak {format_size(record['peak_bytes'])}; {cause}")
    return record


# Name, settings before, settings after.
_Fallback = tuple[str, dict[str, Any], dict[str, Any]]


def _next_fallback(session: TrainingSession) -> _Fallback:
    """Return the next of the configured fallbacks. Raises RunError if none is left."""
    train = session.config.train
    fallbacks = [_smaller_micro_batch(session), _gradient_checkpointing(session)]
    enabled = [train.oom_micro_batch, train.oom_checkpointing]
    left = [one for one, on in zip(fallbacks, enabled, strict=True) if one and on]
    if left:
        return left[-1 if train.oom_checkpointing_first else 0]
    state = "not available" if train.oom_checkpointing else "off"
    if session.state.model.grad_checkpointing:
        state = "on"
    for name, reason in UNSUPPORTED_FALLBACKS.items():
        session.records.line("OOM", f"{name}: not applied ({reason})")
    what = (
        f"out of memory at it {session.state.iteration + 1} with BATCH_SIZE={train.batch_size}, "
        f"gradient checkpointing {state}"
    )
    advice = "use a smaller model, a shorter BLOCK_SIZE or a GPU with more memory"
    raise RunError(Problem(what, str(session.run.logs), advice, code="run.out-of-memory"))


def _smaller_micro_batch(session: TrainingSession) -> _Fallback | None:
    train = session.config.train
    size, count = train.batch_size, train.grad_accumulation
    if size == 1:
        return None
    # The largest proper divisor.
    smaller = max(n for n in range(1, size // 2 + 1) if size % n == 0)
    before = {"micro_batch": size, "accumulation": count}
    return (
        "micro-batch",
        before,
        {"micro_batch": smaller, "accumulation": count * size // smaller},
    )


def _gradient_checkpointing(session: TrainingSession) -> _Fallback | None:
    model = session.state.model
    # Compiled blocks would use other dropout masks in the recomputation.
    supported = isinstance(model, SupportsGradCheckpointing) and not session.config.machine.compile
    if not supported or model.grad_checkpointing:
        return None
    return "gradient checkpointing", {"on": False}, {"on": True}


def _format(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def optimizer_step(
    session: TrainingSession, micro_batches: list[MicroBatch], lr: float
) -> StepMetrics:
    """Run one optimizer step and return its metrics, still on the device.

    Raises NumericsError if loss or gradients are non-finite: with CHECK_NUMERICS before the update,
    otherwise when the log reads them, because reading here would stall a GPU. Raises StepOutOfMemory
    if memory runs out and OOM_FALLBACK is on. Both errors leave weights and states unchanged.
    """
    begun = StepSnapshot.now(session, micro_batches, lr)
    parameters = list(session.state.model.parameters())
    loss = _compute_gradients(session, begun)
    session.state.scaler.unscale_(session.state.optimizer)
    session.state.pruner.mask_gradients()
    norms = _gradient_norms(parameters)
    measured = StepMetrics(loss, norms, torch.linalg.vector_norm(norms))
    if session.config.numerics.due(session.state.iteration + 1):
        require_finite(session, measured, session.state.iteration + 1, begun)
    session.state.pruner.observe(measured.gradient_norm)
    if session.config.train.grad_clip > 0.0:
        torch.nn.utils.clip_grads_with_norm_(
            parameters, session.config.train.grad_clip, measured.gradient_norm
        )
    for group in session.state.optimizer.param_groups:
        group["lr"] = lr
    session.state.scaler.step(session.state.optimizer, gradient_norm=measured.gradient_norm)
    session.state.scaler.update()
    session.state.optimizer.zero_grad(set_to_none=True)
    return measured


def _compute_gradients(session: TrainingSession, begun: StepSnapshot) -> Tensor:
    """Run forward and backward passes and return the loss.

    Rolls back and raises StepOutOfMemory if memory runs out and a fallback is possible.
    """
    probe_memory(session, begun)
    try:
        with cpu_memory_errors(), anomaly_detection(session):
            return accumulate_gradients(session, begun.micro_batches)
    except torch.OutOfMemoryError as error:
        # Other ranks may be in the middle of a collective operation, which cannot be rolled back.
        if not session.config.train.oom_fallback or session.group.size > 1:
            raise
        cause = str(error).splitlines()[0]
    # Outside the except block, so that no traceback keeps the step's tensors alive.
    begun.undo(session)
    raise StepOutOfMemory(Problem(cause, code="run.out-of-memory"))


def accumulate_gradients(session: TrainingSession, micro_batches: list[MicroBatch]) -> Tensor:
    """Accumulate gradients of the mean loss over all micro-batches, and return that loss."""
    share = 1.0 / len(micro_batches)
    total = torch.zeros((), device=session.device)
    # One autocast context for all micro-batches, so that weights are cast once per step.
    with autocast(session.config.machine):
        for i, (x_BT, y_BT) in enumerate(on_device(session, micro_batches), 1):
            total += forward_backward(session, x_BT, y_BT, share, i == len(micro_batches))
            session.records.alive()
    return session.group.add(total) / session.group.size


def _gradient_norms(parameters: list[nn.Parameter]) -> Tensor:
    """Return the norm of each parameter's gradient; zero if the loss does not depend on it."""
    rows = [local(p.detach() if p.grad is None else p.grad) for p in parameters]
    gradients = [
        row.new_zeros(()) if p.grad is None else row
        for p, row in zip(parameters, rows, strict=True)
    ]
    norms = torch.stack(torch._foreach_norm(gradients))
    if not is_sharded(parameters[0]):
        return norms
    # In double precision, in which a square does not overflow.
    return sum_over_shards(norms.double().square(), parameters[0]).sqrt().to(norms.dtype)
