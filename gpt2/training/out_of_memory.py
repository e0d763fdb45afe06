"""Fallbacks when a step runs out of memory: smaller micro-batches and gradient checkpointing.

Every fallback keeps the sequences of a batch. Measures that would change the experiment are only
logged. Shape suffixes: B micro-batch, T tokens.
"""

import gc
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpt2.config import Config
from gpt2.quantized.options import FOUR_BIT_SCHEMES
from gpt2.training.state import StepSnapshot, TrainingSession, TrainState, on_device
from lib.env.gpu import peak_memory_bytes
from lib.env.machine import autocast
from lib.errors import Problem, RunError
from lib.units import format_size

# With two micro-batches, gradients and activations are in memory at the same time.
_PROBED_MICRO_BATCHES = 2
_CPU_ALLOCATOR = "DefaultCPUAllocator: "


class StepOutOfMemory(RunError):
    """Error of a step that ran out of memory and was rolled back on every rank."""


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


def probe_memory(state: TrainState, begun: StepSnapshot) -> None:
    """Try a step of several ranks without communication, in which no rank can roll back."""
    if state.group.size == 1 or not state.config.train.oom_fallback or not state.steps_to_probe:
        return
    cause = ""
    try:
        with cpu_memory_errors(), autocast(state.config.machine):
            for x_BT, y_BT in on_device(state.device, begun.micro_batches[:_PROBED_MICRO_BATCHES]):
                state.backward(x_BT, y_BT, 1.0, exchange=False)
    except torch.OutOfMemoryError as error:
        cause = str(error).splitlines()[0]
    begun.undo(state)
    if state.group.any(bool(cause)):
        what = cause or "out of memory on another rank"
        raise StepOutOfMemory(Problem(what, code="run.out-of-memory"))
    state.steps_to_probe -= 1


def other_experiments(config: Config) -> dict[str, str]:
    """Return measures that need less memory and change the experiment, and their settings.

    In the order in which to try them. Weights of LoRA are frozen, so it begins with trained ones.
    """
    length, base = config.model.shape.block_size, config.init.init_from or "run:NAME"
    measures = {"a shorter sequence": f"BLOCK_SIZE={length // 2}"} if length >= 16 else {}
    stored = {options.base for options in config.model.adapters}
    if not stored:
        measures["LoRA"] = f"LORA=y PRUNING_NONE=y INIT_FROM={base}"
    if not stored & set(FOUR_BIT_SCHEMES):
        measures["LoRA on weights of 4 bits"] = (
            f"LORA=y LORA_BASE_NF4=y PRUNING_NONE=y INIT_FROM={base}"
        )
    return measures


def apply_next_fallback(session: TrainingSession, cause: str) -> dict[str, Any]:
    """Apply the next fallback: half the micro-batch down to one sequence, then checkpointing.

    Log it and return its record. Raises RunError if none is left.
    """
    if session.device.type == "cuda":
        # Free the memory of the failed step, including reference cycles.
        gc.collect()
        torch.cuda.empty_cache()
    size, accumulation = session.config.train.batch_size, session.config.train.grad_accumulation
    # Compiled blocks would use other dropout masks in the recomputation.
    compiled, recomputes = session.config.machine.compile, session.model.grad_checkpointing
    if size > 1:
        # The largest proper divisor.
        smaller = max(n for n in range(1, size // 2 + 1) if size % n == 0)
        action, before = "micro-batch", {"micro_batch": size, "accumulation": accumulation}
        after = {"micro_batch": smaller, "accumulation": accumulation * size // smaller}
    elif not recomputes and not compiled:
        action, before, after = "gradient checkpointing", {"on": False}, {"on": True}
    else:
        for measure, settings in other_experiments(session.config).items():
            text = f"{measure} changes the experiment; as an arm of its own, type: make"
            session.records.line("OOM", f"{text} SET={shlex.quote(settings)}")
        what = (
            f"out of memory at it {session.iteration + 1} with BATCH_SIZE={size}, "
            f"gradient checkpointing {'on' if recomputes else 'not available'}"
        )
        advice = "use a smaller model, a shorter BLOCK_SIZE or a GPU with more memory"
        raise RunError(Problem(what, str(session.run.logs), advice, code="run.out-of-memory"))
    record: dict[str, Any] = {
        "iteration": session.iteration + 1,
        "action": action,
        "from": before,
        "to": after,
        "peak_bytes": peak_memory_bytes(session.device),
    }
    session.apply_fallback(record)
    change = " -> ".join(
        " ".join(f"{name}={value}" for name, value in values.items()) for values in (before, after)
    )
    peak = format_size(record["peak_bytes"])
    session.records.line(
        "OOM", f"it {record['iteration']}: {action} {change}; peak {peak}; {cause}"
    )
    return record
