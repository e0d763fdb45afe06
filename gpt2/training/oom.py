"""When a step does not fit into memory: smaller micro-batches, then less kept of each.

The order is fixed, and no step of it changes what is learned from: a batch has the same sequences.
What would change the experiment is not done, but said. B micro-batch, T tokens.
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

# What is left when nothing fits, and why it is not done here.
NOT_TAKEN = {
    "shorter sequence": "would be another experiment",
    "smaller list": "does not apply where no lists are ranked",
    "LoRA or QLoRA": "does not apply where nothing is fine-tuned",
    "4-bit weights": "does not apply where nothing is fine-tuned",
}
# As many micro-batches as it takes to have gradients and activations at a time.
_REHEARSED = 2


class DoesNotFit(RunError):
    """Memory ran out in a step's passes; they were taken back, on every rank."""


def prove_room(session: Session, begun: Begun) -> None:
    """Where several ranks train: DoesNotFit on all of them unless the step fits on each.

    In the middle of an exchange a rank cannot turn back, so the passes of the first steps are made
    once before, without one.
    """
    if session.group.size == 1 or not session.config.train.oom_fallback or not session.unproved:
        return
    cause = ""
    try:
        with autocast(session.config.machine):
            for x_BT, y_BT in on_device(session, begun.micro_batches[:_REHEARSED]):
                forward_backward(session, x_BT, y_BT, 1.0, exchange=False)
    except torch.OutOfMemoryError as error:
        cause = str(error).splitlines()[0]
    begun.undo(session)
    if session.group.any(bool(cause)):
        raise DoesNotFit(cause or "memory ran out on another rank")
    session.unproved -= 1


def fall_back(session: Session, cause: str) -> dict[str, Any]:
    """Take the next step down, and say so; its record. RunError where none is left."""
    if session.device.type == "cuda":
        # What the failed step held, cycles included.
        gc.collect()
        torch.cuda.empty_cache()
    action, before, after = _next_step(session)
    record = {
        "iteration": session.iteration + 1,
        "action": action,
        "from": before,
        "to": after,
        "peak_bytes": peak_bytes(session.device),
    }
    session.fall_back(record)
    text = f"it {record['iteration']}: {action} {_words(before)} -> {_words(after)}"
    session.records.line("OOM", f"{text}; peak {short(record['peak_bytes'])}B; {cause}")
    return record


def _next_step(session: Session) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """What is done next: its name, and what it changes from and to."""
    train = session.config.train
    size, count = train.batch_size, train.grad_accumulation
    if size > 1:
        # The largest part that divides it.
        part = max(n for n in range(1, size // 2 + 1) if size % n == 0)
        before = {"micro_batch": size, "accumulation": count}
        return "micro-batch", before, {"micro_batch": part, "accumulation": count * size // part}
    model = session.model
    # Compiled blocks would draw other dropout when they are computed again.
    able = isinstance(model, Recomputing) and not session.config.machine.compile
    if able and not model.grad_checkpointing:
        return "gradient checkpointing", {"on": False}, {"on": True}
    has = "on" if able else "not available"
    for name, why in NOT_TAKEN.items():
        session.records.line("OOM", f"{name}: not done, it {why}")
    what = f"out of memory at it {session.iteration + 1} with BATCH_SIZE=1, gradient checkpointing"
    advice = "take a smaller model, a shorter BLOCK_SIZE or a GPU with more memory"
    raise RunError(Problem(f"{what} {has}", str(session.run.logs), advice))


def _words(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
