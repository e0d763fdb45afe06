"""Update time and state of every optimizer beside torch's fused AdamW, on GPT-2's parameters.

    python -m gpt2.bench.optimizers THREADS ROUNDS

The optimizers take their steps in turn on weights and gradients of the same shapes; a run's forward
and backward pass are not in it. AdamWPrune's are AdamW's with state pruning, which makes new masks in
one update of ten.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpt2.bench.cases import configuration
from gpt2.model import GPT
from lib.binding import Value
from lib.optim import OPTIMIZERS
from lib.optim.groups import parameter_groups
from lib.pruning import PRUNERS
from lib.pruning.contract import Pruner

# As often as masks are made anew by default.
_STEPS = 10
_LEARNING_RATE = 1e-4


def measure(threads: int, rounds: int) -> dict[str, dict[str, float | list[float]]]:
    """By optimizer: seconds of an update in each round, and bytes of state; torch's first."""
    times: dict[str, list[float]] = {name: [] for name in ("torch fused AdamW", *OPTIMIZERS)}
    state: dict[str, float] = {}
    for _ in range(rounds):
        for name in times:
            # One at a time: the states of all would not fit beside each other.
            optimizer, pruner = _build(name, threads)
            times[name].append(_update_seconds(optimizer, pruner))
            state[name] = sum(_bytes(held) for held in optimizer.state.values())
            state[name] += _bytes(pruner.state_dict().get("masks", {}))
            del optimizer, pruner
    return {name: {"seconds": found, "state_bytes": state[name]} for name, found in times.items()}


def _build(name: str, threads: int) -> tuple[torch.optim.Optimizer, Pruner]:
    """An optimizer over fresh weights that have a gradient each, and its pruner."""
    own = name in OPTIMIZERS
    settings: dict[str, Value] = {f"OPTIMIZER_{name.upper()}": True} if own else {}
    if name == "adamwspam":
        # As it works from its twentieth step on.
        settings["SPAM_CLIP_DELAY"] = 1
    config = configuration("gpt2-124m+cpu", settings, threads)
    torch.manual_seed(0)
    model = GPT(config.model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    pruner = PRUNERS.module(config.pruning.name)(model, config.pruning)
    if not own:
        return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True), pruner
    groups = parameter_groups(model, config.optimizer.weight_decay)
    build: Callable[..., torch.optim.Optimizer] = OPTIMIZERS.module(name)
    return build(groups, config.optimizer, _LEARNING_RATE), pruner


def _update_seconds(optimizer: torch.optim.Optimizer, pruner: Pruner) -> float:
    """Mean of some updates, after one that makes the state."""
    for count in range(1 + _STEPS):
        if count == 1:
            start = time.perf_counter()
        pruner.mask_gradients()
        optimizer.step()
        # In the middle of the ramp.
        pruner.after_step(count, 0.4, optimizer)
    return (time.perf_counter() - start) / _STEPS


def _bytes(held: Mapping[str, Any]) -> int:
    """Of the tensors among ``held``."""
    tensors = [tensor for tensor in held.values() if isinstance(tensor, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    """The command line."""
    threads, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    sys.stdout.write(json.dumps(measure(threads, rounds)) + "\n")


if __name__ == "__main__":
    main()
