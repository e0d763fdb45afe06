"""Tests of every pruner: sparsity, prunable weights, ramp, resume."""

import io
from collections.abc import Callable

import pytest
import torch

from lib.errors import ConfigError
from lib.pruning.options import PRUNERS, PRUNING_VARIANTS
from tests.lib.pruning.cases import SETTINGS, STEPS

MATRICES = ["first.weight", "second.weight", "third.weight"]


def test_every_pruner_and_variant_is_a_case() -> None:
    pruners = {name.split("-")[0] for name in SETTINGS}
    assert pruners == {*PRUNERS, *PRUNING_VARIANTS} - {"none", "state"}


@pytest.mark.parametrize("target", [0.3, 0.5, 0.9])
def test_reaches_its_target_in_matrices_alone(trial: Callable, case: str, target: float) -> None:
    run = trial(case, PRUNING_SPARSITY=str(target))
    run.steps(1, STEPS)
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


def test_follows_the_ramp_and_revives_nothing(trial: Callable, case: str) -> None:
    run = trial(case)
    total = sum(p.numel() for p in run.weights.values())
    earlier, expected, changed = run.zeros(), 0.0, []
    for step in range(1, STEPS + 1):
        run.step(step)
        now = run.zeros()
        # Inside the ramp, from step 4 to step 30, every fifth step.
        if step in (5, 10, 15, 20, 25, 30):
            expected = run.options.sparsity_at(step / STEPS)
            changed.append(expected)
        # Rounding loses up to half a weight per matrix.
        assert abs(sum(int(z.sum()) for z in now.values()) - expected * total) <= 1.5
        assert all(bool((now[name] | ~earlier[name]).all()) for name in now)
        earlier = now
    assert changed[-1] == 0.5 and len(set(changed)) == 6


def test_gradients_and_optimizer_state_are_masked(trial: Callable, case: str) -> None:
    run = trial(case)
    run.steps(1, 30)
    for step in (31, 32):
        run.step(step)
        for name, parameter in run.weights.items():
            dead = ~run.pruner.masks[name]
            assert int(dead.sum()) > 0
            state = run.optimizer.state[parameter]
            for tensor in (parameter.grad, *(state[k] for k in state if k != "step")):
                assert float(tensor[dead].abs().max()) == 0.0
                assert float(tensor[~dead].abs().max()) > 0.0


# One case per kind of state: masks, sums, no moments, and SPAM's counters with a reset at step 16.
@pytest.mark.parametrize("cut", [4, 17, 30])
@pytest.mark.parametrize(
    "case",
    ["magnitude-global-cubic", "movement-layer-linear", "movement-sgd", "bitter4", "bitter8-spam"],
)
def test_resumed_equals_uninterrupted(trial: Callable, case: str, cut: int) -> None:
    straight = trial(case)
    straight.steps(1, STEPS)

    first = trial(case)
    first.steps(1, cut)
    stream = io.BytesIO()
    state = {"pruner": first.pruner, "optimizer": first.optimizer, "model": first.model}
    torch.save({name: part.state_dict() for name, part in state.items()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    assert all(mask.dtype == torch.bool for mask in saved["pruner"]["masks"].values())
    resumed = trial(case)
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.pruner.load_state_dict(saved["pruner"])
    resumed.steps(cut + 1, STEPS)
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ramp, middle", [("cubic", 0.5 * 0.875), ("linear", 0.25)])
def test_ramp_in_closed_form(trial: Callable, ramp: str, middle: float) -> None:
    options = trial(f"magnitude-global-{ramp}").options
    assert options.sparsity_at(0.0) == options.sparsity_at(0.1) == 0.0
    assert options.sparsity_at(0.425) == pytest.approx(middle)
    assert options.sparsity_at(0.75) == options.sparsity_at(1.0) == 0.5


@pytest.mark.parametrize("name", ["magnitude-layer-linear", "movement-global-linear", "bitter0"])
def test_the_end_of_the_ramp_is_met_off_the_beat(trial: Callable, name: str) -> None:
    run = trial(name, PRUNING_FREQUENCY=7)
    run.steps(1, 29)
    assert run.pruner.sparsity() < 0.5
    run.step(30)
    assert run.pruner.sparsity() == pytest.approx(0.5, abs=0.001)


def test_embeddings_only_when_asked(trial: Callable, case: str) -> None:
    run = trial(case, PRUNING_INCLUDE_EMBEDDINGS=True, PRUNING_SPARSITY="0.9")
    run.steps(1, STEPS)
    # The vocabulary has 12 tokens; the 8 zero rows after them are padding, not pruned weights.
    used = {**run.weights, "wte.weight": run.model.wte.weight[:12]}
    zeros = {name: int((weight == 0).sum()) for name, weight in used.items()}
    sizes = {name: weight.numel() for name, weight in used.items()}
    assert zeros["wte.weight"] > 0.3 * sizes["wte.weight"]
    assert sum(zeros.values()) / sum(sizes.values()) == pytest.approx(0.9, abs=0.0045)
    assert run.pruner.prunable_weights() == sizes
    assert run.pruner.sparsity() == sum(zeros.values()) / sum(sizes.values())
    assert run.pruner.sparsity_by_layer() == {name: zeros[name] / sizes[name] for name in sizes}


def test_a_parameter_without_a_gradient_is_no_obstacle(trial: Callable, case: str) -> None:
    run = trial(case)
    run.model.third.weight.requires_grad_(False)
    for step in range(1, STEPS + 1):
        run.model.third.weight.grad = None
        run.optimizer.zero_grad()
        run.model(run.tokens).square().mean().backward()
        run.pruner.mask_gradients()
        run.pruner.observe(torch.tensor(1.0))
        run.optimizer.step()
        run.pruner.after_step(step, step / STEPS, run.optimizer)
    assert run.pruner.sparsity() == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize(
    ("sparsity", "code"),
    [("1.5", "config.out-of-range"), ("0", "config.out-of-range"), ("nan", "config.non-finite")],
)
def test_an_invalid_sparsity_is_rejected(trial: Callable, sparsity: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trial("movement-global-cubic", PRUNING_SPARSITY=sparsity)
    (problem,) = caught.value.problems
    assert problem.code == code and problem.what.startswith("PRUNING_SPARSITY: ")


def test_rules_name_their_symbol(trial: Callable) -> None:
    with pytest.raises(ConfigError) as caught:
        trial("bitter3", PRUNING_WARMUP="0.75")
    (problem,) = caught.value.problems
    assert problem.code == "config.conflict" and problem.what.startswith("PRUNING_WARMUP: ")
    assert "PRUNING_RAMP_END=0.75" in problem.what
