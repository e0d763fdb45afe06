"""Pruners on a small model in the trainer's order of calls: ramp, scope, scores, settings.

Resumed: tests/gpt2/training/test_optimizers.py.
"""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.optim.build import build_optimizer
from lib.optim.optimizers import parameter_groups
from lib.optim.options import OPTIMIZERS
from lib.pruning.layers import NeverPruned, PaddedEmbedding
from lib.pruning.options import PRUNERS, PRUNING_VARIANTS, NoneOptions
from lib.pruning.pruners import Pruner, bottom_k, build_pruner, prunable_parameters
from lib.pruning.reference import (
    REFERENCES,
    VARIANTS,
    PruningSnapshot,
    documented_stretch,
    lowest,
    ramp_sparsity,
    scope_sparsities,
)

STEPS = 40
# Symbols that are not set have their defaults, so the ramp goes from step 4 to this one.
RAMP_END = 30
MATRICES = ["first.weight", "second.weight", "third.weight"]
# Case → symbols.
SETTINGS: dict[str, dict[str, SymbolValue]] = {
    f"{pruner}-{scope}-{ramp}": {
        f"PRUNING_{pruner.upper()}": True,
        f"PRUNING_SCOPE_{scope.upper()}": True,
        f"PRUNING_RAMP_{ramp.upper()}": True,
        "OPTIMIZER_ADAMWADV": True,
    }
    for pruner in ("magnitude", "movement")
    for scope in ("global", "layer")
    for ramp in ("cubic", "linear")
}
SETTINGS["magnitude-muon"] = {"PRUNING_MAGNITUDE": True, "OPTIMIZER_MUON": True}
SETTINGS["movement-sgd"] = {"PRUNING_MOVEMENT": True, "OPTIMIZER_SGD": True}
SETTINGS |= {
    variant: {"OPTIMIZER_ADAMWPRUNE": True, f"ADAMWPRUNE_VARIANT_{variant.upper()}": True}
    for variant in PRUNING_VARIANTS
}
SETTINGS["bitter8-spam"] = {
    **SETTINGS["bitter8"],
    "ADAMWPRUNE_BASE_ADAMWSPAM": True,
    "SPAM_INTERVAL": 15,
    "SPAM_WARMUP_STEPS": 5,
    "SPAM_CLIP_DELAY": 5,
}
# Each scope, ramp and kind of state: masks, sums, no moments, and SPAM's counters.
KINDS = (
    *("magnitude-layer-cubic", "magnitude-global-linear", "movement-global-cubic", "movement-sgd"),
    *("magnitude-muon", "bitter0", "bitter4", "bitter8-spam"),
)


class Model(nn.Module):
    """Matrices of different scale, so that a global threshold prunes them differently."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.wte = PaddedEmbedding(20, 24, used_rows=12)
        self.norm = nn.LayerNorm(24)
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 20)
        self.third = nn.Linear(20, 12)
        with torch.no_grad():
            self.second.weight.mul_(3.0)
            self.wte.weight[12:] = 0.0

    def forward(self, tokens):
        hidden = torch.tanh(self.first(self.norm(self.wte(tokens))))
        return self.third(torch.tanh(self.second(hidden)))


class Trial:
    """Model in training with its optimizer and its pruner."""

    def __init__(self, values):
        (self.options,) = PRUNERS.bind(values)
        (optimizer,) = OPTIMIZERS.bind(values)
        self.model = Model()
        rule = optimizer.rule
        groups = parameter_groups(self.model, rule.weight_decay, rule.whole_matrices)
        self.optimizer: Any = build_optimizer(optimizer, groups, 1e-2)
        self.weights = prunable_parameters(self.model, self.options.include_embeddings)
        self.pruner: Any = build_pruner(self.options, self.model)
        self.tokens = torch.arange(12)
        # Gradients and weights of each step, for the movement scores.
        self.history: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []

    def step(self, step):
        """Run step ``step`` (from 1) of ``STEPS``."""
        self.optimizer.zero_grad()
        logits = self.model(self.tokens)
        nn.functional.cross_entropy(logits, self.tokens.roll(1)).backward()
        self.pruner.mask_gradients()
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        self.pruner.observe(norm)
        self.history.append(
            {n: (p.grad.clone(), p.detach().clone()) for n, p in self.weights.items()}
        )
        nn.utils.clip_grads_with_norm_(self.model.parameters(), 0.05, norm)
        self.optimizer.step(gradient_norm=norm)
        self.pruner.after_step(step, step / STEPS, self.optimizer)

    def steps(self, first, last):
        """Run steps ``first`` to ``last``, both included."""
        for step in range(first, last + 1):
            self.step(step)

    def zeros(self):
        """Return a mask of the zeros of each prunable weight; rows of padding are none."""
        zeros = {name: p.detach() == 0 for name, p in self.weights.items()}
        return zeros | {"wte.weight": zeros["wte.weight"][:12]} if "wte.weight" in zeros else zeros


@pytest.fixture(scope="module")
def tree():
    return KconfigTree()


@pytest.fixture
def trial(tree):
    """Return a function that builds a case of SETTINGS with changed symbols, ready to train."""

    def build(name, **changes):
        symbols = SETTINGS[name] | {"PRUNING_FREQUENCY": 5} | changes
        return Trial(tree.resolve([ConfigLayer.of("test", "test", symbols)]).values)

    return build


def test_every_pruner_and_variant_is_a_case():
    pruners = {name.split("-")[0] for name in SETTINGS}
    assert pruners == {*PRUNERS, *PRUNING_VARIANTS} - {"none", "state"}


def total(masks):
    return sum(int(mask.sum()) for mask in masks.values())


@pytest.mark.parametrize(
    ("case", "embeddings"), [*((case, True) for case in KINDS), (KINDS[0], False)]
)
def test_follows_the_ramp_and_zeroes_all_of_a_pruned_weight(trial, case, embeddings):
    run = trial(case, PRUNING_INCLUDE_EMBEDDINGS=embeddings, PRUNING_SPARSITY="0.8")
    earlier, expected, changed = run.zeros(), 0.0, []
    sizes = {name: mask.numel() for name, mask in earlier.items()}
    assert list(sizes) == (["wte.weight"] if embeddings else []) + MATRICES
    for step in range(1, STEPS + 1):
        run.step(step)
        now = run.zeros()
        # Inside the ramp, from step 4 to step 30, every fifth step.
        if step in (5, 10, 15, 20, 25, 30):
            expected = ramp_sparsity(run.options, step / STEPS)
            changed.append(expected)
        # Rounding loses up to half a weight per matrix.
        assert abs(total(now) - expected * sum(sizes.values())) <= 2
        assert all(bool((now[name] | ~earlier[name]).all()) for name in now)
        earlier = now
    assert changed[-1] == 0.8 and len(set(changed)) == 6
    for name, parameter in run.model.named_parameters():
        used = parameter[:12] if name == "wte.weight" else parameter
        assert name in sizes or bool((used != 0).all()), name
    for name, parameter in run.weights.items():
        dead, state = earlier[name], run.optimizer.state[parameter]
        assert int(dead.sum()) > 0.2 * sizes[name]
        for tensor in (parameter.grad, *(state[k] for k in state if k != "step")):
            assert float(tensor[: len(dead)][dead].abs().max()) == 0.0
            assert float(tensor[: len(dead)][~dead].abs().max()) > 0.0
    shares = {name: int(mask.sum()) / sizes[name] for name, mask in earlier.items()}
    if run.options.scope == "layer" and case != "bitter4":
        assert list(shares.values()) == pytest.approx([0.8] * len(shares), abs=0.004)
    assert run.pruner.prunable_weights() == sizes
    assert run.pruner.sparsity_by_layer() == shares
    assert run.pruner.sparsity() == total(earlier) / sum(sizes.values())


def expected_scores(run):
    """Return the scores of each matrix by the reference, after the steps of ``run``."""
    for name, parameter in run.weights.items():
        state = run.optimizer.state[parameter]
        seen = PruningSnapshot(
            parameter.detach(),
            [step[name] for step in run.history],
            **{"m": state["exp_avg"], "v": state["exp_avg_sq"]} if "exp_avg" in state else {},
            bias_correction=1 - 0.9 ** len(run.history),
        )
        yield torch.tensor(REFERENCES[type(run.options)](run.options, seen), dtype=torch.float32)


@pytest.mark.parametrize("case", [name for name in SETTINGS if name != "bitter8-spam"])
def test_one_update_equals_the_reference(trial, case):
    """Scores are the sums over all steps before clipping, or of the moments."""
    run = trial(case)
    run.steps(1, 7)
    scores = [run.pruner.score(name, run.optimizer) for name in run.weights]
    for found, expected in zip(scores, expected_scores(run), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    if case.startswith("movement"):
        # Both signs must occur, or a wrong sign would go unnoticed.
        assert 0.1 < float((scores[0] < 0).float().mean()) < 0.9
    run.pruner.after_step(20, 20 / STEPS, run.optimizer)
    reached = ramp_sparsity(run.options, 20 / STEPS)
    layers = [score.flatten().tolist() for score in scores]
    pruned = {
        element
        for members, share in scope_sparsities(run.options, reached, [len(x) for x in layers])
        for element in lowest({k: layers[k] for k in members}, share)
    }
    for k, zeros in enumerate(run.zeros().values()):
        found = zeros.flatten().nonzero().flatten().tolist()
        assert found == sorted(i for layer, i in pruned if layer == k)


def test_the_end_of_the_ramp_is_met_off_the_beat(trial):
    run = trial("magnitude-layer-linear", PRUNING_FREQUENCY=7)
    run.steps(1, 29)
    assert run.pruner.sparsity() < 0.5
    run.step(30)
    assert run.pruner.sparsity() == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_skipped_counts_for_nothing(trial, bad):
    run = trial("movement-global-cubic")
    run.steps(1, 3)
    before = {name: run.pruner.score(name, run.optimizer) for name in run.weights}
    run.model.first.weight.grad[0, 0] = bad
    run.pruner.observe(torch.tensor(bad))
    for name, score in before.items():
        assert torch.equal(run.pruner.score(name, run.optimizer), score)


def test_no_pruner_changes_nothing(tree):
    (options,) = PRUNERS.bind(tree.resolve([]).values)
    assert options == NoneOptions()
    pruner = build_pruner(options, nn.Linear(3, 3))
    assert type(pruner) is Pruner and pruner.sparsity() == 0.0
    assert pruner.sparsity_by_layer() == pruner.prunable_weights() == {}
    pruner.load_state_dict(pruner.state_dict())


TENSORS = {
    "normal": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
    "tiny": torch.randn(500, generator=torch.Generator().manual_seed(2)) * 1e-30,
    "equal": torch.full((7, 11), 0.25),
    "zeros": torch.zeros(300),
    "steps": torch.randint(-3, 4, (9, 20), generator=torch.Generator().manual_seed(3)).float(),
    "infinite": torch.tensor([-torch.inf, torch.inf, -torch.inf, 1.0]),
}
TOTAL = sum(t.numel() for t in TENSORS.values())


@given(st.integers(1, TOTAL), st.sampled_from([97, 1 << 20]))
@settings(max_examples=12)
def test_the_lowest_are_those_of_a_stable_sort(count, chunk_elements):
    joined = torch.cat([t.flatten() for t in TENSORS.values()])
    expected = torch.zeros(TOTAL, dtype=torch.bool)
    expected[torch.sort(joined, stable=True).indices[:count]] = True
    found = dict(bottom_k(TENSORS, count, chunk_elements))
    assert all(found[name].shape == TENSORS[name].shape for name in TENSORS)
    assert torch.equal(torch.cat([found[name].flatten() for name in TENSORS]), expected)


def test_a_matrix_shared_with_an_unprunable_module_is_kept():
    class Gate(NeverPruned):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

    model = nn.ModuleDict({"gate": Gate(), "other": nn.Linear(4, 4)})
    assert set(prunable_parameters(model, False)) == {"other.weight"}
    # Whatever its first name.
    tied = nn.ModuleList([model["gate"].inner[0], model["gate"]])
    assert prunable_parameters(tied, True) == {}


@pytest.mark.parametrize("mean", [0.01, 0.5, 0.9, 0.97, 0.98, 0.99])
def test_the_layer_profile_equals_a_bisection(trial, mean):
    options, sizes = trial("bitter4").options, [100, 3000, 50, 700, 700, 2400]
    found = options.layer_sparsities(mean, sizes)
    assert found == pytest.approx([s for _, s in scope_sparsities(options, mean, sizes)], abs=1e-9)
    assert sum(n * s for n, s in zip(sizes, found)) / sum(sizes) == pytest.approx(mean)
    assert options.layer_sparsities(0.5, [10, 10, 10]) == pytest.approx([0.35, 0.5, 0.65])


@pytest.mark.parametrize("variant", PRUNING_VARIANTS)
def test_a_variant_brings_ramp_scope_and_budget(trial, variant):
    options = trial(variant).options
    assert (options.ramp, options.scope, options.stretch) == VARIANTS[variant]
    shown = options.summary.partition(f", {variant}")[2]
    assert shown == ("" if options.stretch == 1.0 else f", budget x {documented_stretch(variant)}")
    if variant not in ("bitter2", "bitter8"):
        assert trial(variant, ADAMWPRUNE_STRETCH=False).options.stretch == 1.0


@pytest.mark.parametrize(
    ("case", "symbol", "value", "code"),
    [
        ("bitter3", "PRUNING_SPARSITY", "1.5", "config.out-of-range"),
        ("bitter3", "PRUNING_SPARSITY", "0", "config.out-of-range"),
        ("bitter3", "PRUNING_WARMUP", "0.75", "config.conflict"),
        # Without the longer budget, each would be another variant again.
        ("bitter2", "ADAMWPRUNE_STRETCH", False, "config.unmet-dependency"),
        ("bitter8", "ADAMWPRUNE_STRETCH", False, "config.unmet-dependency"),
        # The optimizer has its own pruner.
        ("bitter3", "PRUNING_MOVEMENT", True, "config.unmet-dependency"),
    ],
)
def test_rules_name_their_symbol(trial, case, symbol, value, code):
    with pytest.raises(ConfigError) as caught:
        trial(case, **{symbol: value})
    (problem,) = caught.value.problems
    assert problem.code == code and re.match(rf"{symbol}[:=]|ADAMWPRUNE", problem.what)
    assert symbol in problem.what


def test_state_pruning_has_its_own_scope_and_ramp(tree):
    tree.resolve([ConfigLayer.of("test", "test", {"OPTIMIZER_ADAMWPRUNE": True})])
    choices = [tree.kconf.named_choices[f"PRUNING_{name}"] for name in ("RAMP", "SCOPE")]
    assert [choice.visibility for choice in choices] == [0, 0]
