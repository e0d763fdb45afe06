"""Fallbacks when a step runs out of memory: smaller micro-batches, then gradient checkpointing.

The order is fixed, and every fallback keeps the sequences of a batch. Measures that would change
the experiment are only logged. Shape suffixes: B micro-batch, T tokens.
"""

import gc
from typing import Any

import torch

from gpt2.training.passes import Begun, forward_backward, on_device
from gpt2.training.session import Recomputing, Session
from lib.errors import Problem, RunError
from lib.machine.memory import peak_bytes
from lib.machine.setup import autocast
from lib.units import short

# Further measures, and the reason why they are not applied.
NOT_TAKEN = {
    "shorter sequence": "would change the experiment",
    "smaller list": "applies to ranking only",
    "LoRA or QLoRA": "applies to fine-tuning only",
    "4-bit weights": "applies to fine-tuning only",
}
# With two micro-batches, gradients and activations are in memory at the same time.
_PROBED_MICRO_BATCHES = 2


class DoesNotFit(RunError):
    """Error of a step that ran out of memory and was rolled back on every rank."""


def prove_room(session: Session, begun: Begun) -> None:
    """Raise DoesNotFit on all ranks if the step runs out of memory on one of several ranks.

    A rank cannot roll back during a collective operation, so the passes of the first steps are run
    once before, without communication.
    """
    if session.group.size == 1 or not session.config.train.oom_fallback or not session.unproved:
        return
    cause = ""
    try:
        with autocast(session.config.machine):
            for x_BT, y_BT in on_device(session, begun.micro_batches[:_PROBED_MICRO_BATCHES]):
                forward_backward(session, x_BT, y_BT, 1.0, exchange=False)
    except torch.OutOfMemoryError as error:
        cause = str(error).splitlines()[0]
    begun.undo(session)
    if session.group.any(bool(cause)):
        what = cause or "out of memory on another rank"
        raise DoesNotFit(Problem(what, code="run.out-of-memory"))
    session.unproved -= 1


def fall_back(session: Session, cause: str) -> dict[str, Any]:
    """Apply the next fallback, log it and return its record. Raises RunError if none is left."""
    if session.device.type == "cuda":
        # Free the memory of the failed step, including reference cycles.
        gc.collect()
        torch.cuda.empty_cache()
    action, before, after = _next_fallback(session)
    record = {
        "iteration": session.iteration + 1,
        "action": action,
        "from": before,
        "to": after,
        "peak_bytes": peak_bytes(session.device),
    }
    session.fall_back(record)
    text = f"it {record['iteration']}: {action} {_format(before)} -> {_format(after)}"
    session.records.line("OOM", f"{text}; peak {short(record['peak_bytes'])}B; {cause}")
    return record


def _next_fallback(session: Session) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the name of the next fallback, and its settings before and after."""
    train = session.config.train
    size, count = train.batch_size, train.grad_accumulation
    if size > 1:
        # The largest proper divisor.
        smaller = max(n for n in range(1, size // 2 + 1) if size % n == 0)
        before = {"micro_batch": size, "accumulation": count}
        return (
            "micro-batch",
            before,
            {"micro_batch": smaller, "accumulation": count * size // smaller},
        )
    model = session.model
    # Compiled blocks would use other dropout masks in the recomputation.
    supported = isinstance(model, Recomputing) and not session.config.machine.compile
    if supported and not model.grad_checkpointing:
        return "gradient checkpointing", {"on": False}, {"on": True}
    state = "on" if supported else "not available"
    for name, reason in NOT_TAKEN.items():
        session.records.line("OOM", f"{name}: not applied ({reason})")
    what = f"out of memory at it {session.iteration + 1} with BATCH_SIZE=1, gradient checkpointing"
    advice = "use a smaller model, a shorter BLOCK_SIZE or a GPU with more memory"
    raise RunError(
        Problem(f"{what} {state}", str(session.run.logs), advice, code="run.out-of-memory")
    )


def _format(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
