"""Magnitude pruning: how much, which, when, and that it holds."""

import dataclasses
import io

import pytest
import torch
from torch import nn

from lib.errors import ConfigError
from lib.optim.adamw.module import Adamw
from lib.optim.adamwadv.options import AdamwadvOptions
from lib.optim.groups import parameter_groups
from lib.pruning.magnitude.module import MagnitudePruner
from lib.pruning.magnitude.options import MagnitudeOptions
from lib.pruning.magnitude.reference import pruned
from lib.pruning.mask import Unprunable, prunable_parameters

OPTIONS = MagnitudeOptions(
    target=0.5,
    scope="global",
    ramp="cubic",
    warmup=0.1,
    ramp_end=0.75,
    frequency=10,
    include_embeddings=False,
)
STEPS = 80


class _Model(nn.Module):
    """Matrices of different scale, so that a global threshold prunes them differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.wte = nn.Embedding(12, 24)
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 12)
        with torch.no_grad():
            self.second.weight.mul_(3.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.wte(tokens))))


class _Run:
    """The trainer's order of calls on a small model."""

    def __init__(self, options: MagnitudeOptions) -> None:
        self.model = _Model()
        groups = parameter_groups(self.model, 0.1)
        adamw = AdamwadvOptions(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
        self.optimizer = Adamw(groups, adamw, 1e-2)
        self.weights = prunable_parameters(self.model, options.include_embeddings)
        self.pruner = MagnitudePruner(self.weights, options)
        self.tokens = torch.arange(12)

    def step(self, step: int) -> None:
        logits = self.model(self.tokens)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(logits, self.tokens.roll(1)).backward()
        self.pruner.mask_gradients()
        self.optimizer.step()
        self.pruner.after_step(step, step / STEPS, self.optimizer)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.step(step)

    def zeros(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() == 0 for name, p in self.weights.items()}


@pytest.mark.parametrize("target", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("ramp", ["cubic", "linear"])
def test_reaches_its_target(target: float, scope: str, ramp: str) -> None:
    run = _Run(dataclasses.replace(OPTIONS, target=target, scope=scope, ramp=ramp))
    run.steps(1, STEPS)
    zeros = sum(int((p == 0).sum()) for p in run.weights.values())
    total = sum(p.numel() for p in run.weights.values())
    assert abs(zeros / total - target) < 0.005 * target
    assert run.pruner.sparsity() == zeros / total
    layers = run.pruner.sparsity_by_layer()
    assert list(layers) == ["first.weight", "second.weight"]
    if scope == "layer":
        assert all(abs(share - target) < 0.005 * target for share in layers.values())
    else:
        assert layers["first.weight"] > layers["second.weight"] + 0.02


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("ramp", ["cubic", "linear"])
@pytest.mark.parametrize("progress", [0.05, 0.3, 0.6, 0.75, 1.0])
def test_one_update_equals_the_reference(scope: str, ramp: str, progress: float) -> None:
    options = dataclasses.replace(OPTIONS, scope=scope, ramp=ramp)
    run = _Run(options)
    lists = [p.flatten().tolist() for p in run.weights.values()]
    run.pruner.after_step(10, progress, run.optimizer)
    for found, expected in zip(run.zeros().values(), pruned(lists, options, progress), strict=True):
        assert set(found.flatten().nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("ramp, middle", [("cubic", 0.5 * 0.875), ("linear", 0.25)])
def test_ramp_in_closed_form(ramp: str, middle: float) -> None:
    options = dataclasses.replace(OPTIONS, ramp=ramp)
    assert options.sparsity_at(0.0) == options.sparsity_at(0.1) == 0.0
    assert options.sparsity_at(0.425) == pytest.approx(middle)
    assert options.sparsity_at(0.75) == options.sparsity_at(1.0) == 0.5


def test_updates_come_on_time() -> None:
    run = _Run(OPTIONS)
    changed = []
    before = run.pruner.sparsity()
    for step in range(1, STEPS + 1):
        run.step(step)
        if run.pruner.sparsity() != before:
            changed.append(step)
            before = run.pruner.sparsity()
    # The ramp goes from step 8 to step 60; the last update falls on its end.
    assert changed == [10, 20, 30, 40, 50, 60]


def test_the_end_of_the_ramp_is_met_off_the_beat() -> None:
    run = _Run(dataclasses.replace(OPTIONS, frequency=7, ramp="linear"))
    run.steps(1, 59)
    assert run.pruner.sparsity() < 0.5
    run.step(60)
    assert run.pruner.sparsity() == pytest.approx(0.5, abs=0.0005)


def test_a_pruned_weight_never_returns() -> None:
    run = _Run(OPTIONS)
    earlier = run.zeros()
    for step in range(1, STEPS + 1):
        run.step(step)
        now = run.zeros()
        assert all(bool((now[name] | ~earlier[name]).all()) for name in now)
        earlier = now


def test_gradients_and_optimizer_state_are_masked() -> None:
    run = _Run(OPTIONS)
    run.steps(1, 60)
    for step in (61, 62):
        run.step(step)
        for name, parameter in run.weights.items():
            dead = ~run.pruner.masks[name]
            assert int(dead.sum()) > 0
            state = run.optimizer.state[parameter]
            for tensor in (parameter.grad, *(state[k] for k in state if k != "step")):
                assert float(tensor[dead].abs().max()) == 0.0
                assert float(tensor[~dead].abs().max()) > 0.0
            assert float(state["step"]) == step


def test_embeddings_only_when_asked() -> None:
    model = _Model()
    assert set(prunable_parameters(model, False)) == {"first.weight", "second.weight"}
    assert set(prunable_parameters(model, True)) == {"first.weight", "second.weight", "wte.weight"}


def test_an_unprunable_module_keeps_its_matrices() -> None:
    class Gate(Unprunable):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4))

    model = torch.nn.ModuleDict({"gate": Gate(), "other": torch.nn.Linear(4, 4)})
    assert set(prunable_parameters(model, False)) == {"other.weight"}
    # A matrix that is shared with such a module is kept too, under whatever name it comes first.
    tied = torch.nn.ModuleList([model["gate"].inner[0], model["gate"]])
    assert prunable_parameters(tied, True) == {}


@pytest.mark.parametrize("cut", [4, 25, 59, 60, 70])
def test_resumed_equals_uninterrupted(cut: int) -> None:
    straight = _Run(OPTIONS)
    straight.steps(1, STEPS)

    first = _Run(OPTIONS)
    first.steps(1, cut)
    stream = io.BytesIO()
    state = {"pruner": first.pruner, "optimizer": first.optimizer, "model": first.model}
    torch.save({name: part.state_dict() for name, part in state.items()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    assert all(mask.dtype == torch.bool for mask in saved["pruner"]["masks"].values())
    resumed = _Run(OPTIONS)
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.pruner.load_state_dict(saved["pruner"])
    resumed.steps(cut + 1, STEPS)
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rules_name_their_symbol() -> None:
    with pytest.raises(ConfigError, match="^PRUNING_WARMUP: 0.75 is not below"):
        dataclasses.replace(OPTIONS, warmup=0.75)
