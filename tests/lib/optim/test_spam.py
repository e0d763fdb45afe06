"""Tests of AdamW with SPAM: its events, and what is clipped and damped."""

import dataclasses

import pytest
import torch
from torch import nn

from lib.optim.optimizers import Adam
from lib.optim.options import AdamwspamOptions
from lib.optim.reference import AdamwspamReference
from lib.optim.spam import Adamwspam

STUDY = AdamwspamOptions(
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    theta=50.0,
    clip_delay=20,
    spike_threshold=2.0,
    spike_window=100,
    moment_damping=0.5,
    variance_damping=0.9,
    interval=500,
    reset_warmup_steps=150,
    amsgrad=False,
)
# The study's optimizer with shorter intervals, so that 100 steps contain two resets.
SHORT = dataclasses.replace(
    STUDY, clip_delay=5, spike_window=8, interval=40, reset_warmup_steps=12, theta=5.0
)
SHAPES = [(4, 6), (5,)]
DECAYS = [0.1, 0.0]
# Steps (from 1) with gradients ten times as large: before the window is full, twice between
# resets, and soon after the first reset.
SPIKES = (6, 30, 43, 95)
LR = 1e-2


def _gradients(steps, dtype):
    generator = torch.Generator().manual_seed(3)
    found = []
    for step in range(1, steps + 1):
        scale = 10.0 if step in SPIKES else 1.0
        found.append(
            [torch.randn(s, generator=generator, dtype=dtype) * scale for s in SHAPES],
        )
    return found


def _parameters(dtype):
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]


def _optimizer(parameters, options):
    groups = [
        {"params": [(f"p{k}", p)], "weight_decay": decay}
        for k, (p, decay) in enumerate(zip(parameters, DECAYS, strict=True))
    ]
    return Adamwspam(groups, options, LR)


def _step(optimizer, parameters, gradients):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


def test_events_are_those_of_the_reference_over_two_resets():
    parameters = _parameters(torch.float64)
    optimizer = _optimizer(parameters, SHORT)
    reference = AdamwspamReference([p.flatten().tolist() for p in parameters], SHORT, DECAYS)
    for gradients in _gradients(100, torch.float64):
        clipped_before = len(reference.clipped)
        _step(optimizer, parameters, gradients)
        reference.step([g.flatten().tolist() for g in gradients], LR)
        share = (len(reference.clipped) - clipped_before) / 29
        assert optimizer.statistics()["spam_clipped_fraction"] == pytest.approx(share)
    assert set(SPIKES[1:]) <= set(reference.spikes)
    assert optimizer.statistics()["spam_spikes"] == len(reference.spikes)
    assert optimizer.statistics()["spam_resets"] == 2
    steps_clipped = {n for n, _, _ in reference.clipped}
    assert {30, 95} <= steps_clipped
    # 43 is the third step after a reset: before the clip delay.
    assert not steps_clipped & {1, 2, 3, 4, 41, 42, 43, 44, 81, 82, 83, 84}


def test_without_events_it_is_adamw():
    ours, theirs = _parameters(torch.float32), _parameters(torch.float32)
    quiet = dataclasses.replace(STUDY, theta=1e12, spike_threshold=1e6)
    spam = _optimizer(ours, quiet)
    groups = [{"params": [(f"p{k}", p)], "weight_decay": DECAYS[k]} for k, p in enumerate(theirs)]
    adamw = Adam(groups, quiet, LR)
    for gradients in _gradients(60, torch.float32):
        _step(spam, ours, gradients)
        _step(adamw, theirs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_spike_damps_both_moments():
    parameters = _parameters(torch.float64)
    optimizer = _optimizer(parameters, SHORT)
    for gradients in _gradients(20, torch.float64):
        _step(optimizer, parameters, gradients)
    state = optimizer.state[parameters[0]]
    m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    spike = [torch.full(s, 1e3, dtype=torch.float64) for s in SHAPES]
    _step(optimizer, parameters, spike)
    clipped = torch.sqrt(SHORT.theta * v)
    torch.testing.assert_close(state["exp_avg"], 0.9 * 0.5 * m + 0.1 * clipped)
    torch.testing.assert_close(state["exp_avg_sq"], 0.95 * 0.9 * v + 0.05 * clipped**2)


def test_an_element_without_history_is_not_clipped_to_nothing():
    table = nn.Parameter(torch.ones(3, 4))
    options = dataclasses.replace(SHORT, weight_decay=0.0)
    optimizer = Adamwspam([{"params": [("table", table)], "weight_decay": 0.0}], options, LR)
    for step in range(12):
        table.grad = torch.zeros_like(table)
        table.grad[0] = 1.0
        # The row of a rare token: its first gradient comes when clipping is on.
        if step >= 8:
            table.grad[2] = 1.0
        optimizer.step()
    assert bool((table[2] < 1.0).all())
    assert torch.equal(table[1], torch.ones(4))


@pytest.mark.parametrize("norm, spikes", [(3.95, 0), (4.05, 1)])
def test_a_spike_is_measured_in_population_deviations(norm, spikes):
    """Norms 1 and 3 in turn: mean 2, σ 1, so two deviations end at 4 (at 4.14 for a sample's σ)."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = Adamwspam([{"params": [("w", weight)], "weight_decay": 0.0}], SHORT, LR)
    for value in (1.0, 3.0) * 4 + (norm,):
        weight.grad = torch.ones(4)
        optimizer.step(gradient_norm=torch.tensor(value))
    assert optimizer.statistics()["spam_spikes"] == spikes
