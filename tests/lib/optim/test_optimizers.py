"""Optimizers: float64 references, resume, overflow, parameter groups, Kconfig defaults; SPAM's events."""

import io
import itertools
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.optim.build import build_optimizer
from lib.optim.optimizers import embedding_parameters, parameter_groups
from lib.optim.options import ADAMWPRUNE_BASES, OPTIMIZERS, AdamFamilyOptions
from lib.optim.reference import AdamwspamReference, optimizer_reference

SHAPES = [(5, 7), (11,), (3, 2, 4)]
DECAYS = [0.1, 0.0, 0.1]
STEPS = 50
# Steps (from 0) with gradients ten times as large: twice after SPAM's window is full, and in the third
# step after a reset, which is not clipped.
SPIKES = (11, 22, 33)
# SPAM with intervals scaled down: two resets, warm-ups, clipping and spikes.
SPAM: dict[str, SymbolValue] = {
    "OPTIMIZER_ADAMWSPAM": True,
    "SPAM_THETA": "5",
    "SPAM_CLIP_DELAY": 5,
    "SPAM_SPIKE_WINDOW": 8,
    "SPAM_INTERVAL": 20,
    "SPAM_WARMUP_STEPS": 6,
}
# AdamWPrune is built as its base.
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
    "adamwspam": SPAM,
    "adamwspam-amsgrad": {**SPAM, "SPAM_AMSGRAD": True},
    "adamwspam-quiet": {**SPAM, "SPAM_THETA": "1e12", "SPAM_SPIKE_THRESHOLD": "1e6"},
    "adamwspam-other": {
        **SPAM,
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
# Each class, and each kind of state.
kinds = pytest.mark.parametrize("case", ["sgd-nesterov", "adamw", "adamwspam-amsgrad"])


@pytest.fixture(scope="module")
def options_of():
    """Return a function from symbols to an optimizer's options."""
    tree = KconfigTree()

    def bound(settings):
        return OPTIMIZERS.bind(tree.resolve([ConfigLayer.of("test", "test", settings)]).values)[0]

    return bound


def make_parameters(dtype=torch.float32):
    """Return the same weights on each call."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in SHAPES]


def make_gradients(dtype=torch.float32, steps=STEPS):
    """Return the same gradients on each call, with spikes."""
    generator = torch.Generator().manual_seed(2)
    scales = [10.0 if step in SPIKES else 1.0 for step in range(steps)]
    return [
        [torch.randn(s, generator=generator, dtype=dtype) * scale for s in SHAPES]
        for scale in scales
    ]


def build(options, parameters):
    """Return the optimizer of ``options``, with parameter groups with and without weight decay."""
    named = [(f"p{k}", p) for k, p in enumerate(parameters)]
    groups = [
        {"params": [n for n, d in zip(named, DECAYS, strict=True) if d], "weight_decay": 0.1},
        {"params": [n for n, d in zip(named, DECAYS, strict=True) if not d], "weight_decay": 0.0},
    ]
    return build_optimizer(options, groups, 1e-2)


def rate(step):
    return 1e-2 * (step + 1) / STEPS


def train(optimizer, parameters, first=0, last=STEPS):
    """Run steps ``first`` to ``last``, and yield the statistics of each."""
    for step, gradients in list(enumerate(make_gradients(parameters[0].dtype)))[first:last]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        yield optimizer.statistics()


def test_every_optimizer_is_a_case():
    assert {name.split("-")[0] for name in SETTINGS} | {"adamwprune"} == set(OPTIMIZERS)
    assert list(OPTIMIZERS) == ["sgd", *ADAMWPRUNE_BASES, "adamwprune"]


@pytest.mark.parametrize("case", SETTINGS)
def test_equals_the_naive_loop_and_reports_its_events(options_of, case):
    options, parameters = options_of(SETTINGS[case]), make_parameters(torch.float64)
    flat = [p.detach().flatten().numpy() for p in parameters]
    reference = optimizer_reference(options, flat, DECAYS)
    statistics = list(train(build(options, parameters), parameters))
    for step, gradients in enumerate(make_gradients(torch.float64)):
        reference.step([g.flatten().numpy() for g in gradients], rate(step))
    for parameter, expected in zip(parameters, reference.parameters, strict=True):
        assert abs(parameter.detach().flatten().numpy() - expected).max() < 1e-12
    if not isinstance(reference, AdamwspamReference):
        assert not any(statistics)
        return
    events = [n for n, _, _ in reference.clipped]
    shares = [events.count(n) / sum(map(math.prod, SHAPES)) for n in range(1, STEPS + 1)]
    assert [each["spam_clipped_fraction"] for each in statistics] == pytest.approx(shares)
    assert statistics[-1]["spam_spikes"] == len(reference.spikes)
    resets = [step // options.interval for step in range(STEPS)]
    assert [each["spam_resets"] for each in statistics] == resets
    if case == "adamwspam":
        assert {12, 23, 34} <= set(reference.spikes) and {12, 34} <= set(events)
        assert not set(events) & {1, 2, 3, 4, 21, 22, 23, 24, 41, 42, 43, 44}
    elif case == "adamwspam-quiet":
        assert not events and not reference.spikes


@pytest.mark.parametrize("case", ["sgd", "adam-amsgrad", "adamwspam", "adamwspam-amsgrad"])
def test_resumed_equals_uninterrupted(options_of, case):
    options, straight, saved = options_of(SETTINGS[case]), make_parameters(), {}
    whole = build(options, straight)
    for first, last in itertools.pairwise([0, 1, 19, 20, 21, 34, STEPS]):
        saved[first] = io.BytesIO()
        torch.save({"optimizer": whole.state_dict(), "model": straight}, saved[first])
        list(train(whole, straight, first, last))
    for cut, stream in saved.items():
        stream.seek(0)
        state = torch.load(stream, weights_only=True)
        fresh = [nn.Parameter(p.detach().clone()) for p in state["model"]]
        resumed = build(options, fresh)
        resumed.load_state_dict(state["optimizer"])
        list(train(resumed, fresh, cut))
        assert all(torch.equal(a, b) for a, b in zip(straight, fresh, strict=True)), cut
        assert resumed.statistics() == whole.statistics()


@pytest.mark.parametrize("overflow", [0, 3])
@kinds
def test_a_step_that_overflowed_counts_for_nothing(options_of, case, overflow):
    """An overflowed step, often the first one in fp16, leaves no trace."""
    clean, skipping, states = make_parameters(), make_parameters(), []
    for parameters, bad in ((clean, None), (skipping, overflow)):
        optimizer = build(options_of(SETTINGS[case]), parameters)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(8 + (bad is not None)):
            factor = math.inf if step == bad else 1.0
            scaler.scale(sum((p * factor).sum() for p in parameters)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer, gradient_norm=torch.tensor(1.0))
            scaler.update()
            optimizer.zero_grad()
        states.append(str(optimizer.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(clean, skipping, strict=True))
    assert not torch.equal(clean[0], make_parameters()[0])
    # Counters and norms too.
    assert states[0] == states[1]


@kinds
def test_a_parameter_whose_first_gradient_comes_late_joins_in(options_of, case):
    parameters = make_parameters()
    late = parameters[2].detach().clone()
    optimizer = build(options_of(SETTINGS[case]), parameters)
    for step, gradients in enumerate(make_gradients(steps=12)):
        for k, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None if k == 2 and step < 6 else gradient
        if step == 6:
            assert torch.equal(parameters[2], late)
        optimizer.step()
    assert bool((parameters[2] != late).all())


@kinds
def test_reads_nothing_back_from_the_device(options_of, case):
    """With tensors without data, a step that reads a value would raise here."""
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(s)) for s in SHAPES]
        optimizer = build(options_of(SETTINGS[case]), parameters)
        for _ in range(STEPS // 2):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()


@kinds
def test_the_norm_before_clipping_is_for_spam_alone(options_of, case):
    with_norm, without = make_parameters(), make_parameters()
    for parameters, norm in ((with_norm, torch.tensor(3.0)), (without, None)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = build(options_of(SETTINGS[case]), parameters)
        optimizer.step(gradient_norm=norm)
        assert [g["param_names"] for g in optimizer.param_groups] == [["p0", "p2"], ["p1"]]
        assert all(g["fused"] or g["foreach"] for g in optimizer.param_groups)
    assert all(torch.equal(a, b) for a, b in zip(with_norm, without, strict=True))


def spam_step(optimizer, table, gradient, norm=None):
    table.grad = gradient
    optimizer.step(gradient_norm=norm)


def test_an_element_without_history_is_not_clipped_to_nothing(options_of):
    table = nn.Parameter(torch.ones(3, 4))
    groups = [{"params": [("table", table)], "weight_decay": 0.0}]
    optimizer = build_optimizer(options_of(SPAM), groups, 1e-2)
    for step in range(12):
        # The row of a rare token: its first gradient comes when clipping is on.
        rows = torch.tensor([1.0, 0.0, float(step >= 8)])
        spam_step(optimizer, table, rows[:, None].repeat(1, 4))
    assert bool((table[2] < 1.0).all())
    assert torch.equal(table[1], torch.ones(4))


@pytest.mark.parametrize("norm, spikes", [(3.95, 0), (4.05, 1)])
def test_a_spike_is_measured_in_population_deviations(options_of, norm, spikes):
    """Norms 1 and 3 in turn: mean 2, σ 1, so two deviations end at 4 (at 4.14 for a sample's σ)."""
    weight = nn.Parameter(torch.ones(4))
    groups = [{"params": [("w", weight)], "weight_decay": 0.0}]
    optimizer = build_optimizer(options_of(SPAM), groups, 1e-2)
    for value in (1.0, 3.0) * 4 + (norm,):
        spam_step(optimizer, weight, torch.ones(4), torch.tensor(value))
    assert optimizer.statistics()["spam_spikes"] == spikes


@pytest.mark.parametrize("name", list(ADAMWPRUNE_BASES))
def test_adamwprune_is_its_base(options_of, name):
    options = options_of({"OPTIMIZER_ADAMWPRUNE": True, f"ADAMWPRUNE_BASE_{name.upper()}": True})
    assert isinstance(options.base, AdamFamilyOptions) and options.base.name == name
    optimizer, base = (build(o, make_parameters()) for o in (options, options.base))
    assert type(optimizer) is type(base) and optimizer.defaults == base.defaults
    assert options.summary == f"adamwprune on {options.base.summary}"


@pytest.mark.parametrize(
    "settings, code, parts",
    [
        ({"OPTIMIZER_ADAM": True, "ADAM_BETA1": "1.0"}, "out-of-range", ["ADAM_BETA1: "]),
        ({"OPTIMIZER_ADAMWPRUNE": True, "ADAM_BETA2": "1"}, "out-of-range", ["ADAM_BETA2: "]),
        ({"OPTIMIZER_SGD": True, "SGD_MOMENTUM": "1"}, "out-of-range", ["SGD_MOMENTUM: "]),
        ({**SPAM, "SPAM_WARMUP_STEPS": 20}, "conflict", ["SPAM_WARMUP_STEPS: "]),
        ({**SPAM, "SPAM_CLIP_DELAY": 21}, "conflict", ["SPAM_CLIP_DELAY: "]),
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
        self.norm = nn.LayerNorm(4)
        self.proj = nn.Linear(4, 4)
        self.per_head = nn.Parameter(torch.zeros(2, 3, 4))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_matrices_decay_and_nothing_else():
    decayed, kept = parameter_groups(_Tiny(), 0.1)
    assert [name for name, _ in decayed["params"]] == ["per_head", "proj.weight"]
    names = ["alpha", "head.weight", "norm.bias", "norm.weight", "proj.bias"]
    assert sorted(name for name, _ in kept["params"]) == names
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert set(embedding_parameters(_Tiny())) == {"head.weight"}
    assert len(parameter_groups(nn.Linear(3, 3, bias=False), 0.1)) == 1


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_binds_from_defaults(options_of, name):
    options = options_of({f"OPTIMIZER_{name.upper()}": True})
    assert options.name == name and options.summary.startswith(name)
    assert name != "adamwprune" or options.base.name == "adamw"


@pytest.mark.parametrize(
    ("name", "decoupled", "amsgrad"),
    [("adam", False, False), ("adamw", True, False), ("adamwadv", True, True)],
)
def test_variants_of_adam(options_of, name, decoupled, amsgrad):
    options = options_of({f"OPTIMIZER_{name.upper()}": True})
    assert (options.decoupled, options.amsgrad) == (decoupled, amsgrad)
