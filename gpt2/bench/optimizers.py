"""Update time and state of every optimizer, relative to torch's fused AdamW, on GPT-2's parameters.

    python -m gpt2.bench.optimizers THREADS ROUNDS

The optimizers take their steps in turn on weights and gradients of the same shapes; a run's forward
and backward pass are not in it.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from gpt2.bench.cases import configuration
from gpt2.model import GPT
from lib.binding import Value
from lib.optim import OPTIMIZERS
from lib.optim.groups import parameter_groups

_STEPS = 3
_LEARNING_RATE = 1e-4


def measure(threads: int, rounds: int) -> dict[str, dict[str, float | list[float]]]:
    """By optimizer: update seconds relative to fused AdamW of each round, state bytes a parameter."""
    names = [name for name in OPTIMIZERS if name != "adamwprune"]
    times: dict[str, list[float]] = {name: [] for name in ("torch fused AdamW", *names)}
    state: dict[str, float] = {}
    for _ in range(rounds):
        for name in times:
            # One at a time: the states of all would not fit beside each other.
            optimizer = _build(name, threads)
            times[name].append(_update_seconds(optimizer))
            state[name] = _state_bytes(optimizer)
            del optimizer
    reference = times["torch fused AdamW"]
    return {
        name: {
            "seconds": [a / b for a, b in zip(found, reference, strict=True)],
            "state_bytes_per_parameter": state[name],
        }
        for name, found in times.items()
    }


def _build(name: str, threads: int) -> torch.optim.Optimizer:
    """An optimizer over fresh weights that have a gradient each."""
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
    if not own:
        return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
    groups = parameter_groups(model, config.optimizer.weight_decay)
    build: Callable[..., torch.optim.Optimizer] = OPTIMIZERS.module(name)
    return build(groups, config.optimizer, _LEARNING_RATE)


def _update_seconds(optimizer: torch.optim.Optimizer) -> float:
    """Median of a few updates, after one that makes the state."""
    seconds = []
    for count in range(1 + _STEPS):
        start = time.perf_counter()
        optimizer.step()
        if count:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _state_bytes(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state for each parameter."""
    tensors = (t for state in optimizer.state.values() for t in state.values())
    held = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
    return held / sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def main() -> None:
    """The command line."""
    threads, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    sys.stdout.write(json.dumps(measure(threads, rounds)) + "\n")


if __name__ == "__main__":
    main()
