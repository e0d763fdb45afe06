"""Tests of the optimizers: float64 references, torch's loops, resume, groups, Kconfig defaults."""

import io
import itertools
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lib.errors import ConfigError
from lib.optim.optimizers import embedding_parameters, parameter_groups
from lib.optim.options import ADAMWPRUNE_BASES, OPTIMIZERS, AdamFamilyOptions
from lib.optim.reference import optimizer_reference
from tests.lib.optim.cases import (
    DECAYS,
    SETTINGS,
    SHAPES,
    STEPS,
    build,
    make_gradients,
    make_parameters,
    rate,
    train,
)


def test_every_optimizer_is_a_case():
    assert {name.split("-")[0] for name in SETTINGS} == set(OPTIMIZERS)
    assert list(OPTIMIZERS) == ["sgd", *ADAMWPRUNE_BASES, "adamwprune"]


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_equals_the_naive_float64_loop(options, dtype, bound):
    parameters = make_parameters(dtype)
    flat = [p.detach().double().flatten().numpy() for p in parameters]
    reference = optimizer_reference(options, flat, DECAYS)
    train(build(options, parameters), parameters)
    for step, gradients in enumerate(make_gradients(dtype)):
        reference.step([g.double().flatten().numpy() for g in gradients], rate(step))
    for parameter, expected in zip(parameters, reference.parameters, strict=True):
        assert abs(parameter.detach().double().flatten().numpy() - expected).max() < bound


def test_resumed_equals_uninterrupted(options):
    straight, saved = make_parameters(torch.float32), {}
    whole = build(options, straight)
    cuts = [0, 1, 19, 20, 21, 34, STEPS]
    for first, last in itertools.pairwise(cuts):
        saved[first] = io.BytesIO()
        torch.save({"optimizer": whole.state_dict(), "model": straight}, saved[first])
        train(whole, straight, first, last)
    for cut, stream in saved.items():
        stream.seek(0)
        state = torch.load(stream, weights_only=True)
        fresh = [nn.Parameter(p.detach().clone()) for p in state["model"]]
        resumed = build(options, fresh)
        resumed.load_state_dict(state["optimizer"])
        train(resumed, fresh, cut)
        assert all(torch.equal(a, b) for a, b in zip(straight, fresh, strict=True)), cut
        assert resumed.statistics() == whole.statistics()


@pytest.mark.parametrize("overflow", [0, 3])
def test_a_step_that_overflowed_counts_for_nothing(options, overflow):
    """An overflowed step, often the first one in fp16, leaves no trace."""
    clean, skipping, states = make_parameters(torch.float32), make_parameters(torch.float32), []
    for parameters, bad in ((clean, None), (skipping, overflow)):
        optimizer, scaler = build(options, parameters), torch.amp.GradScaler("cpu")
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        for step in range(8 + (bad is not None)):
            factor = math.inf if step == bad else 1.0
            scaler.scale(sum((p * factor).sum() for p in parameters)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer, gradient_norm=torch.tensor(1.0))
            scaler.update()
            optimizer.zero_grad()
        states.append(str(optimizer.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(clean, skipping, strict=True))
    assert not torch.equal(clean[0], make_parameters(torch.float32)[0])
    # Counters and norms too.
    assert states[0] == states[1]


def test_a_parameter_whose_first_gradient_comes_late_joins_in(options):
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


def test_reads_nothing_back_from_the_device(options):
    """With tensors without data, a step that reads a value would raise here."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(s)) for s in SHAPES]
        optimizer = build(options, parameters)
        for _ in range(STEPS // 2):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()


def test_the_norm_before_clipping_is_for_spam_alone(options):
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


def test_adamwprune_is_its_base(options_of):
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
        (SETTINGS["adamwspam"] | {"SPAM_WARMUP_STEPS": 20}, "conflict", ["SPAM_WARMUP_STEPS: "]),
        (SETTINGS["adamwspam"] | {"SPAM_CLIP_DELAY": 21}, "conflict", ["SPAM_CLIP_DELAY: "]),
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
def test_rules_name_their_symbol(options_of, settings, code, parts):
    with pytest.raises(ConfigError) as caught:
        options_of(settings)
    (problem,) = caught.value.problems
    assert problem.code == f"config.{code}" and problem.what.startswith(parts[0])
    assert all(part in problem.what for part in parts)


class _Tiny(nn.Module):
    """Model with one parameter of each role, the head tied to the embedding."""

    def __init__(self):
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


def test_matrices_decay_and_nothing_else():
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
    assert set(embedding_parameters(_Tiny())) == {"head.weight", "wpe.weight"}
    assert len(parameter_groups(nn.Linear(3, 3, bias=False), 0.1)) == 1


DEFAULTS = {
    "sgd": {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.1},
    "adam": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decoupled": False, "amsgrad": False},
    "adamw": {"beta1": 0.9, "beta2": 0.95, "decoupled": True, "amsgrad": False},
    "adamwadv": {"decoupled": True, "amsgrad": True},
    "adamwspam": {
        "theta": 50.0,
        "clip_delay": 20,
        "interval": 500,
        "reset_warmup_steps": 150,
        "spike_threshold": 2.0,
        "spike_window": 100,
        "moment_damping": 0.5,
        "variance_damping": 0.9,
        "amsgrad": False,
        "decoupled": True,
        "weight_decay": 0.1,
    },
    "adamwprune": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_binds_from_defaults(options_of, name):
    options = options_of({f"OPTIMIZER_{name.upper()}": True})
    assert {field: getattr(options, field) for field in DEFAULTS[name]} == DEFAULTS[name]
    assert options.name == name and options.summary.startswith(name)
    assert name != "adamwprune" or options.base.name == "adamw"
