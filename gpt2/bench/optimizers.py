"""Update time and state size of every optimizer and torch's fused AdamW, on GPT-2's parameters.

    python -m gpt2.bench.optimizers THREADS ROUNDS

The optimizers step in turn on weights and gradients of the same shapes; forward and backward passes
are not included. AdamWPrune is AdamW with state pruning, which computes new masks in one of ten
updates.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from gpt2.bench.trainer import case_config
from gpt2.model import GPT
from lib.config.field import SymbolValue
from lib.optim.optimizers import parameter_groups
from lib.optim.options import OPTIMIZERS
from lib.pruning.pruners import Pruner

# The default interval of mask updates.
_STEPS = 10
_LEARNING_RATE = 1e-4


def measure(threads: int, rounds: int) -> dict[str, dict[str, float | list[float]]]:
    """Return the seconds of an update per round and the bytes of state by optimizer.

    The first entry is torch's fused AdamW.
    """
    times: dict[str, list[float]] = {name: [] for name in ("torch fused AdamW", *OPTIMIZERS)}
    state: dict[str, float] = {}
    for _ in range(rounds):
        for name in times:
            # One optimizer at a time: the states of all of them do not fit into memory together.
            optimizer, pruner = _build(name, threads)
            times[name].append(_update_seconds(optimizer, pruner))
            state[name] = sum(_tensor_bytes(entry) for entry in optimizer.state.values())
            state[name] += _tensor_bytes(pruner.state_dict().get("masks", {}))
            del optimizer, pruner
    return {
        name: {"seconds": seconds, "state_bytes": state[name]} for name, seconds in times.items()
    }


def _build(name: str, threads: int) -> tuple[torch.optim.Optimizer, Pruner]:
    """Build an optimizer over new weights with random gradients, and the matching pruner."""
    registered = name in OPTIMIZERS
    settings: dict[str, SymbolValue] = {f"OPTIMIZER_{name.upper()}": True} if registered else {}
    if name == "adamwspam":
        # Enables spike clipping from the first steps on, as in a longer run.
        settings["SPAM_CLIP_DELAY"] = 1
    config = case_config("gpt2-124m+cpu", settings, threads)
    torch.manual_seed(0)
    model = GPT(config.model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    pruner = config.pruning.build(model)
    if not registered:
        return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True), pruner
    groups = parameter_groups(model, config.optimizer.weight_decay)
    return config.optimizer.build(groups, _LEARNING_RATE), pruner


def _update_seconds(optimizer: torch.optim.Optimizer, pruner: Pruner) -> float:
    """Return the mean seconds of an update, after one update that creates the state."""
    for count in range(1 + _STEPS):
        if count == 1:
            start = time.perf_counter()
        pruner.mask_gradients()
        optimizer.step()
        # A progress of 0.4 lies in the middle of the pruning ramp.
        pruner.after_step(count, 0.4, optimizer)
    return (time.perf_counter() - start) / _STEPS


def _tensor_bytes(entry: Mapping[str, Any]) -> int:
    tensors = [tensor for tensor in entry.values() if isinstance(tensor, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    """Measure all optimizers and print the figures as JSON."""
    threads, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    sys.stdout.write(json.dumps(measure(threads, rounds)) + "\n")


if __name__ == "__main__":
    main()
