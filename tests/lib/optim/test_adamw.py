"""AdamW against torch's plain loop and against the algorithm in float64."""

import pytest
import torch
from torch import nn

from lib.errors import ConfigError
from lib.optim import OPTIMIZERS
from lib.optim.adamw.module import Adamw
from lib.optim.adamw.options import AdamwOptions
from lib.optim.adamw.reference import AdamwReference

OPTIONS = AdamwOptions(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SHAPES = [(5, 7), (11,), (3, 2, 4)]
DECAYS = [0.1, 0.0, 0.1]
STEPS = 50


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]


def _gradients(dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        [torch.randn(s, generator=generator, dtype=dtype) for s in SHAPES] for _ in range(STEPS)
    ]


def _groups(parameters: list[nn.Parameter]) -> list[dict]:
    named = [(f"p{k}", p) for k, p in enumerate(parameters)]
    return [
        {"params": [n for n, d in zip(named, DECAYS, strict=True) if d], "weight_decay": 0.1},
        {"params": [n for n, d in zip(named, DECAYS, strict=True) if not d], "weight_decay": 0.0},
    ]


def _train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for step, gradients in enumerate(_gradients(parameters[0].dtype)):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = _lr(step)
        optimizer.step()


def _lr(step: int) -> float:
    return 1e-2 * (step + 1) / STEPS


def test_equals_torchs_plain_loop() -> None:
    ours, theirs = _parameters(torch.float32), _parameters(torch.float32)
    _train(Adamw(_groups(ours), OPTIONS, lr=0.0), ours)
    plain = torch.optim.AdamW(_groups(theirs), betas=(0.9, 0.95), eps=1e-8, foreach=False)
    _train(plain, theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_equals_the_naive_float64_loop() -> None:
    parameters = _parameters(torch.float64)
    reference = AdamwReference([p.flatten().tolist() for p in parameters], OPTIONS, DECAYS)
    _train(Adamw(_groups(parameters), OPTIONS, lr=0.0), parameters)
    for step, gradients in enumerate(_gradients(torch.float64)):
        reference.step([g.flatten().tolist() for g in gradients], _lr(step))
    for parameter, numbers in zip(parameters, reference.parameters, strict=True):
        expected = torch.tensor(numbers, dtype=torch.float64)
        torch.testing.assert_close(parameter.detach().flatten(), expected, rtol=0, atol=1e-12)


def test_is_fused_and_keeps_names() -> None:
    optimizer = Adamw(_groups(_parameters(torch.float32)), OPTIONS, lr=0.5)
    assert [g["param_names"] for g in optimizer.param_groups] == [["p0", "p2"], ["p1"]]
    assert all(g["fused"] and g["lr"] == 0.5 for g in optimizer.param_groups)
    assert optimizer.statistics() == {}


def test_gradient_norm_changes_nothing() -> None:
    with_norm, without = _parameters(torch.float32), _parameters(torch.float32)
    for parameters, norm in ((with_norm, torch.tensor(3.0)), (without, None)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        Adamw(_groups(parameters), OPTIONS, lr=0.1).step(gradient_norm=norm)
    assert all(torch.equal(a, b) for a, b in zip(with_norm, without, strict=True))


def test_a_beta_of_one_is_refused_by_its_symbol() -> None:
    with pytest.raises(ConfigError, match="ADAM_BETA1") as caught:
        AdamwOptions(beta1=1.0, beta2=1.0, eps=1e-8, weight_decay=0.1)
    assert [p.what.split(":")[0] for p in caught.value.problems] == ["ADAM_BETA1", "ADAM_BETA2"]


def test_registry_builds_it() -> None:
    values = {
        "OPTIMIZER": "adamw",
        "ADAM_BETA1": "0.9",
        "ADAM_BETA2": "0.95",
        "ADAM_EPS": "1e-8",
        "WEIGHT_DECAY": "0.1",
    }
    assert OPTIMIZERS.bind(values) == (OPTIONS,)
    assert OPTIMIZERS.module("adamw") is Adamw
    assert OPTIONS.summary == "adamw, betas 0.9 0.95, weight decay 0.1"
