"""Tests of the optimizers: float64 references, torch's loops, resume, groups, Kconfig defaults."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lib.config.field import SymbolValue, from_symbols, kconfig_fields
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.optim.optimizers import embedding_parameters, matrix_parameters, parameter_groups
from lib.optim.options import ADAMWPRUNE_BASES, OPTIMIZERS, AdamFamilyOptions
from lib.optim.schedule import ScheduleOptions, learning_rate_at
from tests.lib.optim import parity
from tests.lib.optim.cases import (
    SETTINGS,
    SHAPES,
    STEPS,
    build,
    make_gradients,
    make_parameters,
    train,
)
from tests.lib.optim.parity import from_loop, from_torch


def test_every_optimizer_is_a_case() -> None:
    assert {name.split("-")[0] for name in SETTINGS} == set(OPTIMIZERS)
    assert list(OPTIMIZERS) == ["sgd", *ADAMWPRUNE_BASES, "adamwprune"]


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_equals_the_naive_float64_loop(options: Any, dtype: torch.dtype, bound: float) -> None:
    assert from_loop(options, dtype) < bound


@pytest.mark.parametrize("options", [n for n in SETTINGS if "spam" not in n], indirect=True)
def test_equals_torchs_plain_loop(options: Any) -> None:
    found = from_torch(options)
    assert found is not None and found < 1e-13


def test_the_command_prints_every_case(capsys: pytest.CaptureFixture) -> None:
    parity.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
    assert [row[0].removeprefix("| ") for row in rows] == list(SETTINGS)
    for name, single, double, torch_own in rows:
        assert float(single) < 5e-6 and float(double) < 1e-12
        assert (torch_own == "- |") == ("spam" in name)


@pytest.mark.parametrize("cut", [1, 19, 20, 21, 34])
def test_resumed_equals_uninterrupted(options: Any, cut: int) -> None:
    straight = make_parameters(torch.float32)
    train(build(options, straight), straight)
    first = make_parameters(torch.float32)
    optimizer = build(options, first)
    train(optimizer, first, last=cut)
    stream = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": first}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    fresh = [nn.Parameter(p.detach().clone()) for p in saved["model"]]
    resumed = build(options, fresh)
    resumed.load_state_dict(saved["optimizer"])
    train(resumed, fresh, first=cut)
    assert all(torch.equal(a, b) for a, b in zip(straight, fresh, strict=True))


@pytest.mark.parametrize("overflows", [(0,), (3,)])
def test_a_step_that_overflowed_counts_for_nothing(options: Any, overflows: tuple) -> None:
    """An overflowed step, often the first one in fp16, leaves no trace."""
    clean, skipping = make_parameters(torch.float32), make_parameters(torch.float32)
    for parameters, bad in ((clean, ()), (skipping, overflows)):
        optimizer, scaler = build(options, parameters), torch.amp.GradScaler("cpu")
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        for step in range(8 + len(bad)):
            factor = math.inf if step in bad else 1.0
            scaler.scale(sum((p * factor).sum() for p in parameters)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer, gradient_norm=torch.tensor(1.0))
            scaler.update()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(clean, skipping, strict=True))
    assert not torch.equal(clean[0], make_parameters(torch.float32)[0])


def test_a_parameter_whose_first_gradient_comes_late_joins_in(options: Any) -> None:
    parameters = make_parameters(torch.float32)
    late = parameters[2].detach().clone()
    optimizer = build(options, parameters)
    for step, gradients in enumerate(make_gradients(torch.float32, 12)):
        for k, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None if k == 2 and step < 6 else gradient
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        if step == 6:
            assert torch.equal(parameters[2], late)
        optimizer.step()
    assert bool((parameters[2] != late).all())


def test_reads_nothing_back_from_the_device(options: Any) -> None:
    """With tensors without data, a step that reads a value would raise here."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(s)) for s in SHAPES]
        optimizer = build(options, parameters)
        for _ in range(STEPS // 2):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()


def test_the_norm_before_clipping_is_for_spam_alone(options: Any) -> None:
    with_norm, without = make_parameters(torch.float32), make_parameters(torch.float32)
    for parameters, norm in ((with_norm, torch.tensor(3.0)), (without, None)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = build(options, parameters)
        optimizer.step(gradient_norm=norm)
        assert [g["param_names"] for g in optimizer.param_groups] == [["p0", "p2"], ["p1"]]
        assert all(g["fused"] or g["foreach"] for g in optimizer.param_groups)
        assert bool(optimizer.statistics()) == ("spam" in str(options))
    assert all(torch.equal(a, b) for a, b in zip(with_norm, without, strict=True))


_CHANGES: dict[str, SymbolValue] = {
    "SGD_MOMENTUM": "0.8",
    "SGD_DAMPENING": "0.1",
    "SGD_NESTEROV": True,
    "ADAM_BETA1": "0.8",
    "ADAM_BETA2": "0.9",
    "ADAM_EPS": "1e-3",
    "ADAM_AMSGRAD": True,
    "SPAM_THETA": "2",
    "SPAM_CLIP_DELAY": 7,
    "SPAM_SPIKE_THRESHOLD": "9",
    "SPAM_SPIKE_WINDOW": 40,
    "SPAM_MOMENT_DAMPING": "0.9",
    "SPAM_VARIANCE_DAMPING": "0.1",
    "SPAM_INTERVAL": 15,
    "SPAM_WARMUP_STEPS": 3,
    "SPAM_AMSGRAD": True,
}


# WEIGHT_DECAY is excluded because it is part of the parameter groups.
_OWN = [
    (name, field.metadata["symbol"])
    for name in ("sgd", "adam", "adamw", "adamwadv", "adamwspam")
    for field in kconfig_fields(OPTIMIZERS.options(name))
    if field.metadata["symbol"] != "WEIGHT_DECAY"
]


@pytest.mark.parametrize("name, symbol", _OWN)
def test_every_setting_changes_the_result(options_of: Callable, name: str, symbol: str) -> None:
    found = []
    for settings in ({}, {symbol: _CHANGES[symbol]}):
        parameters = make_parameters(torch.float32)
        train(build(options_of(SETTINGS[name] | settings), parameters), parameters)
        found.append(parameters[0])
    assert not torch.equal(*found)


def test_adamwprune_is_its_base(options_of: Callable) -> None:
    for name in ADAMWPRUNE_BASES:
        options = options_of(SETTINGS[f"adamwprune-{name}"])
        assert isinstance(options.base, AdamFamilyOptions) and options.base.name == name
        optimizer, base = (
            build(o, make_parameters(torch.float32)) for o in (options, options.base)
        )
        assert type(optimizer) is type(base) and optimizer.defaults == base.defaults
        assert options.summary == f"adamwprune on {options.base.summary}"


@pytest.mark.parametrize(
    "settings, code, parts",
    [
        ({"OPTIMIZER_ADAM": True, "ADAM_BETA1": "1.0"}, "out-of-range", ["ADAM_BETA1: "]),
        ({"OPTIMIZER_ADAMWPRUNE": True, "ADAM_BETA2": "1"}, "out-of-range", ["ADAM_BETA2: "]),
        ({"OPTIMIZER_SGD": True, "SGD_MOMENTUM": "1"}, "out-of-range", ["SGD_MOMENTUM: "]),
        (
            {"OPTIMIZER_SGD": True, "SGD_NESTEROV": True, "SGD_DAMPENING": "0.5"},
            "conflict",
            ["SGD_NESTEROV: ", "SGD_MOMENTUM", "0.9", "SGD_DAMPENING", "0.5"],
        ),
        (
            {"OPTIMIZER_SGD": True, "ADAM_BETA1": "0.8"},
            "unmet-dependency",
            ["ADAM_BETA1=0.8: ", "OPTIMIZER_SGD=n"],
        ),
        (
            {"OPTIMIZER_ADAMW": True, "ADAM_AMSGRAD": True},
            "unmet-dependency",
            ["ADAM_AMSGRAD=y: ", "OPTIMIZER_ADAM || ADAMWPRUNE_BASE_ADAM"],
        ),
    ],
)
def test_rules_name_their_symbol(
    options_of: Callable, settings: dict[str, SymbolValue], code: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(settings)
    (problem,) = caught.value.problems
    assert problem.code == f"config.{code}" and problem.what.startswith(parts[0])
    assert all(part in problem.what for part in parts)


class _Tiny(nn.Module):
    """Model with one parameter of each role, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        # Defined before the embedding, so that the tied matrix has the head's name first.
        self.head = nn.Linear(4, 10, bias=False)
        self.wte = nn.Embedding(10, 4)
        self.head.weight = self.wte.weight
        self.wpe = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.proj = nn.Linear(4, 4)
        self.per_head = nn.Parameter(torch.zeros(2, 3, 4))
        self.gate = nn.Parameter(torch.zeros(2))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_matrices_decay_and_nothing_else() -> None:
    decayed, kept = parameter_groups(_Tiny(), 0.1)
    assert [name for name, _ in decayed["params"]] == ["per_head", "proj.weight"]
    assert decayed["weight_decay"] == 0.1
    assert {name for name, _ in kept["params"]} == {
        "gate",
        "alpha",
        "head.weight",
        "wpe.weight",
        "norm.weight",
        "norm.bias",
        "proj.bias",
    }
    assert kept["weight_decay"] == 0.0


def test_every_trainable_parameter_is_in_one_group_once() -> None:
    model = _Tiny()
    grouped = [id(p) for group in parameter_groups(model, 0.1) for _, p in group["params"]]
    trainable = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(grouped) == sorted(trainable)


def test_a_tied_matrix_is_an_embedding() -> None:
    assert set(embedding_parameters(_Tiny())) == {"head.weight", "wpe.weight"}
    assert "head.weight" not in matrix_parameters(_Tiny())


def test_an_empty_group_is_left_out() -> None:
    assert len(parameter_groups(nn.Linear(3, 3, bias=False), 0.1)) == 1


@pytest.fixture(scope="module")
def values(tree: KconfigTree) -> Callable[[dict[str, SymbolValue]], dict[str, SymbolValue]]:
    """Return a function from symbols to all resolved values."""
    return lambda settings: tree.resolve([ConfigLayer.of("test", "test", settings)]).values


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd"])
def test_every_adam_binds_from_defaults(options_of: Callable, name: str) -> None:
    options = options_of({f"OPTIMIZER_{name.upper()}": True})
    assert (options.name, options.weight_decay) == (name, 0.1)
    base = options.base if name == "adamwprune" else options
    assert (base.beta1, base.beta2, base.eps) == (0.9, 0.95, 1e-8)
    assert base.decoupled == (base.name != "adam") and base.amsgrad == (base.name == "adamwadv")


def test_sgd_binds_from_defaults(options_of: Callable) -> None:
    options = options_of({"OPTIMIZER_SGD": True})
    assert (options.momentum, options.dampening, options.nesterov) == (0.9, 0.0, False)
    assert options.summary.startswith("sgd, ")
    assert "0.9" in options.summary and "0.1" in options.summary


def test_adamwprune_is_built_on_adamw_and_brings_state_pruning(values: Callable) -> None:
    found = values({"OPTIMIZER_ADAMWPRUNE": True})
    assert (found["ADAMWPRUNE_BASE"], found["PRUNING"]) == ("adamw", "state")
    assert found["ADAMWPRUNE_VARIANT"] == "bitter0"
    assert found["ADAMWPRUNE_BASE"] in ADAMWPRUNE_BASES


def test_defaults_are_the_studys(options_of: Callable, values: Callable) -> None:
    assert values({})["OPTIMIZER"] == "adamw"
    options = options_of({"OPTIMIZER_ADAMWSPAM": True})
    assert (options.theta, options.clip_delay, options.interval) == (50.0, 20, 500)
    assert (options.spike_threshold, options.spike_window) == (2.0, 100)
    assert (options.moment_damping, options.variance_damping) == (0.5, 0.9)
    assert (options.reset_warmup_steps, options.amsgrad) == (150, False)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_binds_and_evaluates(values: Callable, kind: str) -> None:
    options = from_symbols(ScheduleOptions, values({f"LR_SCHEDULE_{kind.upper()}": True}))
    assert options.kind == kind
    assert learning_rate_at(options, 1999, 0.2, 0.2) == pytest.approx(6e-4)
