"""Optimizers: float64 references, overflow, parameter groups, Kconfig defaults; SPAM's events."""

import math

import pytest
import torch
from torch import nn

from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.optim.build import build_optimizer
from lib.optim.optimizers import embedding_parameters, parameter_groups
from lib.optim.options import ADAMWPRUNE_BASES, OPTIMIZERS, AdamFamilyOptions, MuonOptions
from lib.optim.reference import AdamwspamReference, OptimizedTensor, optimizer_reference
from lib.pruning.layers import PaddedHead, StackedLinear

SHAPES = [(5, 7), (11,), (3, 2, 4)]
DECAYS = [0.1, 0.0, 0.1]
# Those that Muon updates: two stacked ones, and three.
MATRICES = [((2, 7), (3, 7)), (), ((2, 4),) * 3]
PEAK = 1e-2
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
SETTINGS |= {
    "muon": {"OPTIMIZER_MUON": True},
    "muon-other": {
        "OPTIMIZER_MUON": True,
        "MUON_LEARNING_RATE": "0.05",
        "MUON_MOMENTUM": "0.8",
        "MUON_NESTEROV": False,
        "MUON_STEPS": 3,
        "MUON_SCALE_RMS": True,
    },
}
# Each class, and each kind of state.
kinds = pytest.mark.parametrize("case", ["sgd-nesterov", "adamw", "adamwspam-amsgrad", "muon"])


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
        {"params": [named[0], named[2]], "weight_decay": 0.1},
        {"params": [named[1]], "weight_decay": 0.0},
    ]
    if options.rule.whole_matrices:
        groups[:1] = [
            {"params": [named[0]], "weight_decay": 0.1, "rows": (2, 3)},
            {"params": [named[2]], "weight_decay": 0.1, "rows": (2,)},
        ]
    return build_optimizer(options, groups, PEAK)


def rate(step):
    return PEAK * (step + 1) / STEPS


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
    assert list(OPTIMIZERS) == ["sgd", *ADAMWPRUNE_BASES, "muon", "adamwprune"]


@pytest.mark.parametrize("case", SETTINGS)
def test_equals_the_naive_loop_and_reports_its_events(options_of, case):
    options, parameters = options_of(SETTINGS[case]), make_parameters(torch.float64)
    tensors = [
        OptimizedTensor(p.detach().flatten().numpy(), decay, matrices)
        for p, decay, matrices in zip(parameters, DECAYS, MATRICES, strict=True)
    ]
    reference = optimizer_reference(options, tensors, PEAK)
    statistics = list(train(build(options, parameters), parameters))
    for step, gradients in enumerate(make_gradients(torch.float64)):
        reference.step([g.flatten().numpy() for g in gradients], rate(step))
    for parameter, expected in zip(parameters, reference.parameters, strict=True):
        assert abs(parameter.detach().flatten().numpy() - expected).max() < 1e-12
    if isinstance(options, MuonOptions):
        rates = [options.learning_rate * (step + 1) / STEPS for step in range(STEPS)]
        assert [each["muon_learning_rate"] for each in statistics] == pytest.approx(rates)
        return
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
def test_the_norm_before_clipping_is_for_spam_alone(options_of, case):
    with_norm, without = make_parameters(), make_parameters()
    for parameters, norm in ((with_norm, torch.tensor(3.0)), (without, None)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = build(options_of(SETTINGS[case]), parameters)
        optimizer.step(gradient_norm=norm)
        names = [name for g in optimizer.param_groups for name in g["param_names"]]
        assert names == ["p0", "p2", "p1"]
        assert all(parameter.grad is not None for parameter in parameters)
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


def muon_update(options_of, gradient, rows, **settings):
    """Return the first update of a matrix at the learning rate 1 without weight decay."""
    symbols = {"OPTIMIZER_MUON": True, "MUON_LEARNING_RATE": "1", **settings}
    weight = nn.Parameter(torch.zeros_like(gradient))
    groups = [{"params": [("w", weight)], "weight_decay": 0.0, "rows": rows}]
    optimizer = build_optimizer(options_of(symbols), groups, PEAK)
    weight.grad = gradient
    optimizer.step()
    return -weight.detach()


@pytest.mark.parametrize("scale, factor", [("SHAPE", math.sqrt(3)), ("RMS", 0.2 * math.sqrt(48))])
def test_muon_rotates_like_the_gradient_with_singular_values_near_one(options_of, scale, factor):
    gradient = torch.randn((48, 16), generator=torch.Generator().manual_seed(3)).double()
    update = muon_update(options_of, gradient, (48,), **{f"MUON_SCALE_{scale}": True})
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    inner = left.mT @ (update / factor) @ right.mT
    values = inner.diagonal()
    assert values.min() > 0.65 and values.max() < 1.25
    assert (inner - values.diag()).abs().max() < 1e-12
    # The size of a gradient has no effect, and without one there is no direction.
    doubled = muon_update(options_of, 8.0 * gradient, (48,), **{f"MUON_SCALE_{scale}": True})
    assert torch.equal(doubled, update)
    assert not muon_update(options_of, torch.zeros_like(gradient), (48,)).any()


def test_muon_updates_stacked_matrices_as_if_each_were_alone(options_of):
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn((rows, 8), generator=generator).double() for rows in (8, 4, 4)]
    stacked = muon_update(options_of, torch.cat(parts), (8, 4, 4))
    alone = [muon_update(options_of, part, (len(part),)) for part in parts]
    assert torch.equal(stacked, torch.cat(alone))
    assert not torch.allclose(stacked, muon_update(options_of, torch.cat(parts), (16,)))


def test_muon_updates_matrices_of_a_shape_together_as_in_parts(options_of):
    updated = []
    for chunk in (1, 1 << 20):
        generator = torch.Generator().manual_seed(5)
        named = [(str(i), nn.Parameter(torch.zeros(16, 12))) for i in range(5)]
        groups = [{"params": named, "weight_decay": 0.0, "rows": (8, 8)}]
        optimizer = build_optimizer(options_of(SETTINGS["muon"]), groups, PEAK)
        optimizer.chunk_elements = chunk
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        updated.append(torch.stack([parameter.detach() for _, parameter in named]))
    assert torch.equal(*updated)


def test_muon_without_hidden_matrices_is_refused_before_training(options_of):
    options = options_of(SETTINGS["muon"]).rule
    groups = parameter_groups(nn.Embedding(3, 4), 0.1, options.whole_matrices)
    with pytest.raises(ConfigError) as caught:
        build_optimizer(options, groups, PEAK)
    (problem,) = caught.value.problems
    assert problem.what.startswith("OPTIMIZER_MUON: ") and problem.code == "config.conflict"
    assert "OPTIMIZER_ADAMW=y" in problem.next


@pytest.mark.parametrize(
    "settings, code, parts",
    [
        ({"OPTIMIZER_ADAM": True, "ADAM_BETA1": "1.0"}, "out-of-range", ["ADAM_BETA1: "]),
        ({"OPTIMIZER_ADAMWPRUNE": True, "ADAM_BETA2": "1"}, "out-of-range", ["ADAM_BETA2: "]),
        ({"OPTIMIZER_SGD": True, "SGD_MOMENTUM": "1"}, "out-of-range", ["SGD_MOMENTUM: "]),
        ({"OPTIMIZER_MUON": True, "MUON_MOMENTUM": "1"}, "out-of-range", ["MUON_MOMENTUM: "]),
        ({"OPTIMIZER_MUON": True, "MUON_MOMENTUM": "0"}, "conflict", ["MUON_NESTEROV: "]),
        ({"OPTIMIZER_MUON": True, "ADAM_BETA2": "1"}, "out-of-range", ["ADAM_BETA2: "]),
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
        (
            {"OPTIMIZER_ADAMW": True, "PRUNING_STATE": True},
            "unmet-dependency",
            ["PRUNING_STATE=y: ", "OPTIMIZER_ADAMWPRUNE"],
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
        self.untied = PaddedHead(4, 10, 8)
        self.norm = nn.LayerNorm(4)
        self.proj = nn.Linear(4, 4)
        self.per_head = nn.Parameter(torch.zeros(2, 3, 4))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def test_matrices_decay_and_nothing_else():
    decayed, kept = parameter_groups(_Tiny(), 0.1)
    assert [name for name, _ in decayed["params"]] == ["per_head", "proj.weight"]
    names = ["alpha", "head.weight", "norm.bias", "norm.weight", "proj.bias", "untied.weight"]
    assert sorted(name for name, _ in kept["params"]) == names
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert set(embedding_parameters(_Tiny())) == {"head.weight", "untied.weight"}
    assert len(parameter_groups(nn.Linear(3, 3, bias=False), 0.1)) == 1


def test_hidden_matrices_are_grouped_by_shape_and_stacks():
    model = _Tiny()
    model.stacked, model.other = StackedLinear(4, (3, 1), bias=True), nn.Linear(4, 4)
    *hidden, rest = parameter_groups(model, 0.1, whole_matrices=True)
    names = [[name for name, _ in group["params"]] for group in hidden]
    assert names == [["per_head"], ["proj.weight", "other.weight"], ["stacked.weight"]]
    assert [group["rows"] for group in hidden] == [(3,), (4,), (3, 1)]
    assert {group["weight_decay"] for group in hidden} == {0.1}
    biases = {"proj.bias", "other.bias", "stacked.bias", "norm.bias"}
    kept = {name for name, _ in rest["params"]}
    assert kept == {"alpha", "head.weight", "untied.weight", "norm.weight", *biases}
    assert rest["weight_decay"] == 0.0 and "rows" not in rest


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_binds_from_defaults(options_of, name):
    options = options_of({f"OPTIMIZER_{name.upper()}": True})
    assert options.name == name and options.summary.startswith(name)
    adam = {"adam": (False, False), "adamw": (True, False), "adamwadv": (True, True)}
    if name in adam:
        assert (options.decoupled, options.amsgrad) == adam[name]


@pytest.mark.parametrize("name", list(ADAMWPRUNE_BASES))
def test_adamwprune_is_its_base(options_of, name):
    options = options_of({"OPTIMIZER_ADAMWPRUNE": True, f"ADAMWPRUNE_BASE_{name.upper()}": True})
    assert isinstance(options.base, AdamFamilyOptions) and options.base.name == name
    optimizer, base = (build(o, make_parameters()) for o in (options, options.base))
    assert type(optimizer) is type(base) and optimizer.defaults == base.defaults
    assert options.summary == f"adamwprune on {options.base.summary}"
