"""A few optimizer steps of one run on random tokens: does it hold together on this device?

It shows that a run does not crash, that its numbers are finite, and that every parameter learns
something. It says nothing of what the model learns, reads no data and writes nothing.
"""

import math

import torch
from torch import Tensor, nn

from gpt2.config import Config
from gpt2.model import GPT
from lib.machine.process import Process
from lib.machine.setup import autocast, grad_scaler, preflight, set_up
from lib.optim import OPTIMIZERS
from lib.optim.groups import parameter_groups
from lib.pruning import PRUNERS
from lib.pruning.mask import prunable_parameters
from lib.repro.rng import seed_all
from lib.repro.streams import stream_seed

_STEPS = 4
_LONGEST_CONTEXT = 128


def try_out(config: Config) -> list[str]:
    """Train ``config`` for four steps of one sequence; what is wrong with it, nothing if all is well.

    PreflightError when this machine lacks the device.
    """
    preflight(config.machine, config.train.gpus)
    # However many processes train the run, one of them shows whether it works.
    device = set_up(config.machine, Process())
    model = GPT(config.model)
    model.init_weights(config.seed)
    model.to(device)
    seed_all(config.seed)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, learning = _train(model, config, _random_tokens(config).to(device))
    steps = enumerate(losses, 1)
    problems = [f"loss is {loss} at step {i}" for i, loss in steps if not math.isfinite(loss)]
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            problems.append(f"{name} is not finite")
        elif name not in learning:
            problems.append(f"{name} never gets a gradient")
        elif torch.equal(parameter, before[name]):
            problems.append(f"{name} does not move")
    return problems


def _train(model: GPT, config: Config, ids_BT: Tensor) -> tuple[list[float], set[str]]:
    """The loss of each step, and the parameters that had a gradient other than zero in any."""
    groups = parameter_groups(model, config.optimizer.weight_decay)
    rate = config.schedule.learning_rate
    optimizer = OPTIMIZERS.module(config.optimizer.name)(groups, config.optimizer, rate)
    prunable = prunable_parameters(model, config.pruning.include_embeddings)
    pruner = PRUNERS.module(config.pruning.name)(prunable, config.pruning)
    scaler = grad_scaler(config.machine)
    losses, learning = [], set()
    for step in range(1, _STEPS + 1):
        with autocast(config.machine):
            loss = model(ids_BT[:, :-1], ids_BT[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        learning |= {name for name, p in model.named_parameters() if _has_gradient(p)}
        pruner.mask_gradients()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        pruner.observe(norm)
        largest = config.train.grad_clip or torch.inf
        nn.utils.clip_grads_with_norm_(model.parameters(), largest, norm)
        scaler.step(optimizer, gradient_norm=norm)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        pruner.after_step(step, step / _STEPS, optimizer)
        losses.append(loss.item())
    return losses, learning


def _random_tokens(config: Config) -> Tensor:
    """[1, T + 1] token ids from the run's seed: they stand for no text."""
    shape = config.model.shape
    generator = torch.Generator().manual_seed(stream_seed(config.seed, "dry_run"))
    length = min(_LONGEST_CONTEXT, shape.block_size) + 1
    return torch.randint(shape.vocab_size, (1, length), generator=generator)


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())
