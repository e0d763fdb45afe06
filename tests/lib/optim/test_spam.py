"""Tests of AdamW with SPAM: float64 reference, resets, resumes and gradient accumulation."""

import dataclasses
import io
import math

import pytest
import torch
from torch import nn

from lib.errors import ConfigError
from lib.optim.optimizers import Adam, parameter_groups
from lib.optim.options import OPTIMIZERS, AdamwspamOptions
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


def _gradients(steps: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for step in range(1, steps + 1):
        scale = 10.0 if step in SPIKES else 1.0
        found.append(
            [torch.randn(s, generator=generator, dtype=dtype) * scale for s in SHAPES],
        )
    return found


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]


def _optimizer(parameters: list[nn.Parameter], options: AdamwspamOptions) -> Adamwspam:
    groups = [
        {"params": [(f"p{k}", p)], "weight_decay": decay}
        for k, (p, decay) in enumerate(zip(parameters, DECAYS, strict=True))
    ]
    return Adamwspam(groups, options, LR)


def _step(
    optimizer: Adamwspam, parameters: list[nn.Parameter], gradients: list[torch.Tensor]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_equals_the_reference_over_two_resets(
    amsgrad: bool, dtype: torch.dtype, bound: float
) -> None:
    options = dataclasses.replace(SHORT, amsgrad=amsgrad)
    parameters = _parameters(dtype)
    optimizer = _optimizer(parameters, options)
    reference = AdamwspamReference([p.flatten().tolist() for p in parameters], options, DECAYS)
    worst = 0.0
    for gradients in _gradients(100, dtype):
        clipped_before = len(reference.clipped)
        _step(optimizer, parameters, gradients)
        reference.step([g.flatten().tolist() for g in gradients], LR)
        for parameter, numbers in zip(parameters, reference.parameters, strict=True):
            expected = torch.tensor(numbers, dtype=torch.float64)
            worst = max(worst, float((parameter.detach().flatten() - expected).abs().max()))
        share = (len(reference.clipped) - clipped_before) / 29
        assert optimizer.statistics()["spam_clipped_fraction"] == pytest.approx(share)
    assert worst < bound
    # Check that spikes, clipping and two resets occurred.
    assert set(SPIKES[1:]) <= set(reference.spikes)
    assert optimizer.statistics()["spam_spikes"] == len(reference.spikes)
    assert optimizer.statistics()["spam_resets"] == 2
    steps_clipped = {n for n, _, _ in reference.clipped}
    assert {30, 95} <= steps_clipped
    # 43 is the third step after a reset: before the clip delay.
    assert not steps_clipped & {1, 2, 3, 4, 41, 42, 43, 44, 81, 82, 83, 84}


def test_without_events_it_is_adamw() -> None:
    ours, theirs = _parameters(torch.float32), _parameters(torch.float32)
    quiet = dataclasses.replace(STUDY, theta=1e12, spike_threshold=1e6)
    spam = _optimizer(ours, quiet)
    groups = [{"params": [(f"p{k}", p)], "weight_decay": DECAYS[k]} for k, p in enumerate(theirs)]
    adamw = Adam(groups, quiet, LR)
    for gradients in _gradients(60, torch.float32):
        _step(spam, ours, gradients)
        _step(adamw, theirs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_spike_damps_both_moments() -> None:
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


def test_an_element_without_history_is_not_clipped_to_nothing() -> None:
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


def test_a_parameter_whose_first_gradient_comes_late_joins_in() -> None:
    """Clipping and damping are active by then, but the parameter has no moments yet."""
    first, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [("first", first), ("late", late)], "weight_decay": 0.0}]
    optimizer = Adamwspam(groups, SHORT, LR)
    for step in range(15):
        first.grad = torch.ones(3)
        late.grad = torch.ones(3) if step >= 10 else None
        optimizer.step()
    assert float(optimizer.state[late]["step"]) == 5.0
    assert bool((late < 1.0).all())


def test_the_norm_before_clipping_is_what_spikes() -> None:
    """After clipping to norm 1, all steps look alike; the norm before clipping differs."""
    parameters = _parameters(torch.float32)
    optimizer = _optimizer(parameters, SHORT)
    for step in range(1, 13):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(gradient_norm=torch.tensor(50.0 if step == 11 else 1.0 + 0.01 * (step % 3)))
    assert optimizer.statistics()["spam_spikes"] == 1


@pytest.mark.parametrize("norm, spikes", [(3.95, 0), (4.05, 1)])
def test_a_spike_is_measured_in_population_deviations(norm: float, spikes: int) -> None:
    """Norms 1 and 3 in turn: mean 2, σ 1, so two deviations end at 4 (at 4.14 for a sample's σ)."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = Adamwspam([{"params": [("w", weight)], "weight_decay": 0.0}], SHORT, LR)
    for value in (1.0, 3.0) * 4 + (norm,):
        weight.grad = torch.ones(4)
        optimizer.step(gradient_norm=torch.tensor(value))
    assert optimizer.statistics()["spam_spikes"] == spikes


def _regression(steps: int, options: AdamwspamOptions) -> list[float]:
    """Return the losses of a small network trained from scratch."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    inputs = torch.randn(64, 6)
    targets = torch.sin(inputs.sum(1, keepdim=True))
    optimizer = Adamwspam(parameter_groups(model, 0.01), options, 1e-2)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_trains_from_the_first_step_and_across_a_reset() -> None:
    losses = _regression(200, dataclasses.replace(STUDY, interval=100, reset_warmup_steps=30))
    assert losses[20] < 0.8 * losses[0]
    assert losses[99] < 0.5 * losses[0]
    # The reset at step 101 must not undo progress, and the loss still decreases after it.
    assert max(losses[100:]) < 1.5 * losses[99]
    assert losses[-1] < 0.8 * losses[99]


def _reloaded(optimizer: Adamwspam, parameters: list[nn.Parameter]) -> tuple[Adamwspam, list]:
    """Return both after a round trip through a file of tensors and numbers only."""
    stream = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": parameters}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    fresh = [nn.Parameter(p.detach().clone()) for p in saved["model"]]
    resumed = _optimizer(fresh, optimizer._options)
    resumed.load_state_dict(saved["optimizer"])
    return resumed, fresh


@pytest.mark.parametrize("cut", [3, 39, 40, 41, 46, 60])
def test_resumed_equals_uninterrupted_across_a_reset(cut: int) -> None:
    options = dataclasses.replace(SHORT, amsgrad=True)
    straight = _parameters(torch.float32)
    optimizer = _optimizer(straight, options)
    gradients = _gradients(100, torch.float32)
    for step in gradients:
        _step(optimizer, straight, step)

    parameters = _parameters(torch.float32)
    first = _optimizer(parameters, options)
    for step in gradients[:cut]:
        _step(first, parameters, step)
    resumed, parameters = _reloaded(first, parameters)
    for step in gradients[cut:]:
        _step(resumed, parameters, step)
    assert all(torch.equal(a, b) for a, b in zip(straight, parameters, strict=True))
    assert resumed.statistics() == optimizer.statistics()
    assert torch.equal(resumed._norms, optimizer._norms)


def test_accumulation_does_not_advance_the_counter() -> None:
    weight = nn.Parameter(torch.ones(4))
    options = dataclasses.replace(SHORT, interval=10, reset_warmup_steps=2)
    optimizer = Adamwspam([{"params": [("w", weight)], "weight_decay": 0.0}], options, LR)
    for _ in range(10):
        optimizer.zero_grad()
        for _ in range(8):
            (weight.sum() / 8).backward()
        optimizer.step()
    # 80 backward passes, ten steps: the reset comes with the eleventh.
    assert optimizer.statistics()["spam_resets"] == 0
    weight.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.statistics()["spam_resets"] == 1
    assert float(optimizer.state[weight]["step"]) == 1.0


def test_learning_rate_warms_up_after_a_reset_only() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = Adamwspam([{"params": [("w", weight)], "weight_decay": 0.0}], SHORT, LR)
    rates = []
    for _ in range(60):
        weight.grad = torch.ones(4)
        optimizer.step()
        rates.append(optimizer.effective_learning_rate)
        assert optimizer.param_groups[0]["lr"] == LR
    assert rates[:40] == [LR] * 40
    assert rates[40] == pytest.approx(LR * (1 - math.cos(math.pi / 12)) / 2)
    assert rates[45] == pytest.approx(LR / 2)
    assert rates[51:] == [LR] * 9


def test_gradient_scaler_skips_an_overflow_whole() -> None:
    """In fp16, a step with an infinite gradient leaves weights, step counter and norms unchanged."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = Adamwspam([{"params": [("w", weight)], "weight_decay": 0.0}], SHORT, LR)
    scaler = torch.amp.GradScaler("cpu")
    for value in (1.0, math.inf, 1.0):
        scaler.scale((weight * value).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer, gradient_norm=torch.tensor(2.0))
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state_dict()["spam"]["steps"] == 2
    assert bool(torch.isfinite(weight).all())
    assert optimizer._norms.tolist()[:3] == [2.0, 2.0, 0.0]


def test_runs_on_tensors_without_data() -> None:
    """A step that reads a value from the device would raise here."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    options = dataclasses.replace(
        SHORT, spike_window=2, clip_delay=2, interval=4, reset_warmup_steps=2
    )
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(s)) for s in SHAPES]
        optimizer = _optimizer(parameters, options)
        for _ in range(6):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()


@pytest.mark.parametrize(
    "change, symbol, code",
    [
        ({"reset_warmup_steps": 500}, "SPAM_WARMUP_STEPS", "config.conflict"),
        ({"clip_delay": 501}, "SPAM_CLIP_DELAY", "config.conflict"),
        ({"beta2": 1.0}, "ADAM_BETA2", "config.out-of-range"),
    ],
)
def test_rules_name_their_symbol(change: dict, symbol: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(STUDY, **change)
    (problem,) = caught.value.problems
    assert problem.code == code and problem.what.startswith(f"{symbol}: ")


def test_registry_builds_it() -> None:
    assert OPTIMIZERS.options("adamwspam") is AdamwspamOptions
    assert isinstance(_optimizer(_parameters(torch.float32), STUDY), Adamwspam)
    assert "500" in STUDY.summary and "150" in STUDY.summary
