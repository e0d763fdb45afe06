"""Settings of every optimizer that trigger its features within 50 steps, and a small problem."""

import torch
from torch import nn

from lib.config.field import SymbolValue
from lib.optim.build import build_optimizer
from lib.optim.options import ADAMWPRUNE_BASES

SHAPES = [(5, 7), (11,), (3, 2, 4)]
DECAYS = [0.1, 0.0, 0.1]
STEPS = 50
# Steps (from 0) with gradients ten times as large, after SPAM's window is full.
SPIKES = (11, 33)

# SPAM with intervals scaled down: two resets, warm-ups, clipping and spikes.
_SPAM: dict[str, SymbolValue] = {
    "SPAM_THETA": "5",
    "SPAM_CLIP_DELAY": 5,
    "SPAM_SPIKE_WINDOW": 8,
    "SPAM_INTERVAL": 20,
    "SPAM_WARMUP_STEPS": 6,
}
SETTINGS: dict[str, dict[str, SymbolValue]] = {
    "sgd": {"OPTIMIZER_SGD": True, "SGD_MOMENTUM": "0.8"},
    "sgd-plain": {"OPTIMIZER_SGD": True, "SGD_MOMENTUM": "0"},
    "sgd-dampened": {"OPTIMIZER_SGD": True, "SGD_DAMPENING": "0.3"},
    "sgd-nesterov": {"OPTIMIZER_SGD": True, "SGD_NESTEROV": True},
    "adam": {"OPTIMIZER_ADAM": True},
    "adam-amsgrad": {"OPTIMIZER_ADAM": True, "ADAM_AMSGRAD": True},
    "adamw": {"OPTIMIZER_ADAMW": True},
    "adamw-other": {
        "OPTIMIZER_ADAMW": True,
        "ADAM_BETA1": "0.8",
        "ADAM_BETA2": "0.9",
        "ADAM_EPS": "1e-3",
    },
    "adamwadv": {"OPTIMIZER_ADAMWADV": True},
    "adamwspam": {"OPTIMIZER_ADAMWSPAM": True, **_SPAM},
    "adamwspam-amsgrad": {"OPTIMIZER_ADAMWSPAM": True, "SPAM_AMSGRAD": True, **_SPAM},
    "adamwspam-other": {
        **_SPAM,
        "OPTIMIZER_ADAMWSPAM": True,
        "SPAM_THETA": "2",
        "SPAM_CLIP_DELAY": 7,
        "SPAM_SPIKE_THRESHOLD": "1.0",
        "SPAM_SPIKE_WINDOW": 5,
        "SPAM_MOMENT_DAMPING": "0.9",
        "SPAM_VARIANCE_DAMPING": "0.1",
        "SPAM_INTERVAL": 15,
        "SPAM_WARMUP_STEPS": 3,
    },
}
for base in ADAMWPRUNE_BASES:
    SETTINGS[f"adamwprune-{base}"] = {
        "OPTIMIZER_ADAMWPRUNE": True,
        f"ADAMWPRUNE_BASE_{base.upper()}": True,
        **(_SPAM if base == "adamwspam" else {}),
    }


def make_parameters(dtype):
    """Return the same weights on each call."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]


def make_gradients(dtype, steps=STEPS):
    """Return the same gradients on each call, with spikes."""
    generator = torch.Generator().manual_seed(2)
    scales = [10.0 if step in SPIKES else 1.0 for step in range(steps)]
    return [
        [torch.randn(s, generator=generator, dtype=dtype) * scale for s in SHAPES]
        for scale in scales
    ]


def make_groups(parameters):
    """Return parameter groups like ``parameter_groups``: with and without weight decay."""
    named = [(f"p{k}", p) for k, p in enumerate(parameters)]
    return [
        {"params": [n for n, d in zip(named, DECAYS, strict=True) if d], "weight_decay": 0.1},
        {"params": [n for n, d in zip(named, DECAYS, strict=True) if not d], "weight_decay": 0.0},
    ]


def build(options, parameters):
    """Return the optimizer of ``options``."""
    return build_optimizer(options, make_groups(parameters), 0.0)


def rate(step):
    """Return a learning rate that varies with the step."""
    return 1e-2 * (step + 1) / STEPS


def train(optimizer, parameters, first=0, last=STEPS):
    """Run steps ``first`` to ``last`` with the gradients of ``make_gradients``."""
    for step, gradients in list(enumerate(make_gradients(parameters[0].dtype)))[first:last]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
