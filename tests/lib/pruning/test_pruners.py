"""Tests of the pruners: sparsity, prunable weights, ramp, scores, resume, Kconfig defaults."""

import io
import math

import pytest
import torch
from torch import nn

from lib.errors import ConfigError
from lib.pruning.layers import NeverPruned
from lib.pruning.options import PRUNERS, PRUNING_VARIANTS, NoneOptions
from lib.pruning.pruners import Pruner, bottom_k, build_pruner, prunable_parameters
from lib.pruning.reference import (
    REFERENCES,
    PruningSnapshot,
    lowest,
    ramp_sparsity,
    scope_sparsities,
)
from tests.lib.pruning.cases import RAMP_END, SETTINGS, STEPS

MATRICES = ["first.weight", "second.weight", "third.weight"]


def test_every_pruner_and_variant_is_a_case():
    pruners = {name.split("-")[0] for name in SETTINGS}
    assert pruners == {*PRUNERS, *PRUNING_VARIANTS} - {"none", "state"}


def test_reaches_its_target_in_matrices_alone(trial, case):
    target = 0.9
    run = trial(case, PRUNING_SPARSITY="0.9")
    run.steps(1, RAMP_END)
    total = sum(p.numel() for p in run.weights.values())
    zeros = sum(int(z.sum()) for z in run.zeros().values())
    assert abs(zeros / total - target) < 0.005 * target
    assert run.pruner.sparsity() == zeros / total
    layers = run.pruner.sparsity_by_layer()
    assert list(layers) == MATRICES
    for name, parameter in run.model.named_parameters():
        used = parameter[:12] if name == "wte.weight" else parameter
        assert name in MATRICES or bool((used != 0).all()), name
    if run.options.scope == "layer" and case != "bitter4":
        assert all(abs(share - target) < 0.005 * target for share in layers.values())


def test_follows_the_ramp_and_revives_nothing(trial, case):
    run = trial(case)
    total = sum(p.numel() for p in run.weights.values())
    earlier, expected, changed = run.zeros(), 0.0, []
    for step in range(1, STEPS + 1):
        run.step(step)
        now = run.zeros()
        # Inside the ramp, from step 4 to step 30, every fifth step.
        if step in (5, 10, 15, 20, 25, 30):
            expected = ramp_sparsity(run.options, step / STEPS)
            changed.append(expected)
        # Rounding loses up to half a weight per matrix.
        assert abs(sum(int(z.sum()) for z in now.values()) - expected * total) <= 1.5
        assert all(bool((now[name] | ~earlier[name]).all()) for name in now)
        earlier = now
    assert changed[-1] == 0.5 and len(set(changed)) == 6


def test_gradients_and_optimizer_state_are_masked(trial, case):
    run = trial(case)
    run.steps(1, RAMP_END)
    for step in (RAMP_END + 1, RAMP_END + 2):
        run.step(step)
        for name, parameter in run.weights.items():
            dead = ~run.pruner.masks[name]
            assert int(dead.sum()) > 0
            state = run.optimizer.state[parameter]
            for tensor in (parameter.grad, *(state[k] for k in state if k != "step")):
                assert float(tensor[dead].abs().max()) == 0.0
                assert float(tensor[~dead].abs().max()) > 0.0


# One case per kind of state: masks, sums, no moments, and SPAM's counters with a reset at step 16.
@pytest.mark.parametrize(
    "case",
    ["magnitude-global-cubic", "movement-layer-linear", "movement-sgd", "bitter4", "bitter8-spam"],
)
def test_resumed_equals_uninterrupted(trial, case):
    straight, saved = trial(case), {}
    for step in range(1, STEPS + 1):
        straight.step(step)
        if step in (4, 17, 30):
            parts = {name: getattr(straight, name) for name in ("pruner", "optimizer", "model")}
            saved[step] = io.BytesIO()
            torch.save({name: part.state_dict() for name, part in parts.items()}, saved[step])
    for cut, stream in saved.items():
        stream.seek(0)
        state = torch.load(stream, weights_only=True)
        assert all(mask.dtype == torch.bool for mask in state["pruner"]["masks"].values())
        resumed = trial(case)
        resumed.model.load_state_dict(state["model"])
        resumed.optimizer.load_state_dict(state["optimizer"])
        resumed.pruner.load_state_dict(state["pruner"])
        resumed.steps(cut + 1, STEPS)
        for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(a, b), cut


@pytest.mark.parametrize("name", ["magnitude-layer-linear", "movement-global-linear", "bitter0"])
def test_the_end_of_the_ramp_is_met_off_the_beat(trial, name):
    run = trial(name, PRUNING_FREQUENCY=7)
    run.steps(1, 29)
    assert run.pruner.sparsity() < 0.5
    run.step(30)
    assert run.pruner.sparsity() == pytest.approx(0.5, abs=0.001)


def test_embeddings_only_when_asked(trial, case):
    run = trial(case, PRUNING_INCLUDE_EMBEDDINGS=True, PRUNING_SPARSITY="0.9")
    run.steps(1, RAMP_END)
    # The vocabulary has 12 tokens; the 8 zero rows after them are padding, not pruned weights.
    used = {**run.weights, "wte.weight": run.model.wte.weight[:12]}
    zeros = {name: int((weight == 0).sum()) for name, weight in used.items()}
    sizes = {name: weight.numel() for name, weight in used.items()}
    assert zeros["wte.weight"] > 0.3 * sizes["wte.weight"]
    assert sum(zeros.values()) / sum(sizes.values()) == pytest.approx(0.9, abs=0.0045)
    assert run.pruner.prunable_weights() == sizes
    assert run.pruner.sparsity() == sum(zeros.values()) / sum(sizes.values())
    assert run.pruner.sparsity_by_layer() == {name: zeros[name] / sizes[name] for name in sizes}


def test_a_parameter_without_a_gradient_is_no_obstacle(trial, case):
    run = trial(case)
    run.model.third.weight.requires_grad_(False)
    for step in range(1, RAMP_END + 1):
        run.model.third.weight.grad = None
        run.optimizer.zero_grad()
        run.model(run.tokens).square().mean().backward()
        run.pruner.mask_gradients()
        run.pruner.observe(torch.tensor(1.0))
        run.optimizer.step()
        run.pruner.after_step(step, step / STEPS, run.optimizer)
    assert run.pruner.sparsity() == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize(
    ("symbol", "value", "code"),
    [
        ("PRUNING_SPARSITY", "1.5", "config.out-of-range"),
        ("PRUNING_SPARSITY", "0", "config.out-of-range"),
        ("PRUNING_WARMUP", "0.75", "config.conflict"),
    ],
)
def test_rules_name_their_symbol(trial, symbol, value, code):
    with pytest.raises(ConfigError) as caught:
        trial("bitter3", **{symbol: value})
    (problem,) = caught.value.problems
    assert problem.code == code and problem.what.startswith(f"{symbol}: ")


TENSORS = {
    "normal": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
    "tiny": torch.randn(500, generator=torch.Generator().manual_seed(2)) * 1e-30,
    "equal": torch.full((7, 11), 0.25),
    "zeros": torch.zeros(300),
    "steps": torch.randint(-3, 4, (9, 20), generator=torch.Generator().manual_seed(3)).float(),
    "infinite": torch.tensor([-torch.inf, torch.inf, -torch.inf, 1.0]),
}
TOTAL = sum(t.numel() for t in TENSORS.values())


@pytest.mark.parametrize("chunk_elements", [97, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 3, 250, 700, 900, 1100, 1500, TOTAL - 1, TOTAL])
def test_equals_a_stable_sort(count, chunk_elements):
    joined = torch.cat([t.flatten() for t in TENSORS.values()])
    expected = torch.zeros(TOTAL, dtype=torch.bool)
    expected[torch.sort(joined, stable=True).indices[:count]] = True
    found = dict(bottom_k(TENSORS, count, chunk_elements))
    assert all(found[name].shape == TENSORS[name].shape for name in TENSORS)
    assert torch.equal(torch.cat([found[name].flatten() for name in TENSORS]), expected)


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
    scopes = scope_sparsities(run.options, reached, [len(layer) for layer in layers])
    pruned = {
        element
        for members, share in scopes
        for element in lowest({k: layers[k] for k in members}, share)
    }
    for k, zeros in enumerate(run.zeros().values()):
        found = zeros.flatten().nonzero().flatten().tolist()
        assert found == sorted(i for layer, i in pruned if layer == k)


def test_an_unprunable_module_keeps_its_matrices():
    class Gate(NeverPruned):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(4, 4))

    model = torch.nn.ModuleDict({"gate": Gate(), "other": torch.nn.Linear(4, 4)})
    assert set(prunable_parameters(model, False)) == {"other.weight"}
    # A matrix shared with such a module is excluded too, whatever its first name.
    tied = torch.nn.ModuleList([model["gate"].inner[0], model["gate"]])
    assert prunable_parameters(tied, True) == {}


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
