"""Native sparse attention with disabled branches and with random selection."""

import itertools

import pytest
import torch

from gpt2.model import GPT
from gpt2.nsa.reference import random_rank, top_blocks
from gpt2.nsa.select import random_blocks
from gpt2.shape import ModelShape
from tests.gpt2.builders import SHAPE, make_model_config
from tests.gpt2.nsa.sizes import NAMES, PAIR, SUBSETS, every_form, options, pattern_of

CPU = torch.device("cpu")


@every_form
def test_what_is_built_is_what_is_declared(build, branches, kind, shared):
    """Check parameters and their gradients."""
    case = build(20, projection=PAIR, pattern=pattern_of(branches, kind, shared))
    parameters = dict(case.module.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == case.options.cost(case.shape).params
    matrices = sum(p.numel() for p in parameters.values() if p.ndim >= 2)
    assert matrices == case.options.cost(case.shape).weights
    whole = case()[0]
    slopes = torch.autograd.grad(whole.square().sum(), list(parameters.values()))
    assert [n for n, s in zip(parameters, slopes) if not s.count_nonzero()] == []


@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_pairs_and_costs_are_of_what_is_built(branches):
    whole, part = options().pairs(33), pattern_of(branches, "score", True).pairs(33)
    # Compressed keys rank blocks without a branch of their own.
    ranks = {"compressed"} if "selected" in branches else set[str]()
    assert part == tuple(p if n in {*branches} | ranks else 0 for n, p in zip(NAMES, whole))
    shape = ModelShape(**{**SHAPE, "block_size": 33, "bias": False})
    if ranks and "compressed" not in branches:
        kinds = [pattern_of(branches, kind, True) for kind in ("score", "random")]
        costs = [4 * shape.n_embd * o.mean_keys(33) + o.cost(shape, PAIR).flops for o in kinds]
        # q·k for each of them, and nothing else.
        assert costs[0] - costs[1] == pytest.approx(2 * shape.n_embd * whole[0] / 33)


def test_drawn_blocks_are_those_of_the_definition(monkeypatch):
    """The first, the own and the previous block, and random others; a part draws the same."""
    # Several chunks.
    monkeypatch.setattr("gpt2.nsa.select.CHUNK_ELEMENTS", 100)
    given = options(select_by="random", count=5)
    whole = random_blocks(given, 3, 2, 0, 80, CPU)
    assert whole.shape == (1, 2, 80, 5)
    for head, t in itertools.product(range(2), range(80)):
        score = {j: float(random_rank(3, head, t, j)) for j in range(t // 6 + 1)}
        row = top_blocks(score, given)
        assert whole[0, head, t].tolist() == row + [-1] * (5 - len(row))
    assert torch.equal(random_blocks(given, 3, 2, 50, 1, CPU), whole[:, :, 50:51])
    assert torch.equal(random_blocks(given, 3, 2, 0, 41, CPU), whole[:, :, :41])


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_branches_start_as_their_mean(branches, gate):
    built = {f"branch_{name}": name in branches for name in NAMES}
    model = GPT(make_model_config("grouped", "nsa", parts={"nsa": {"gate": gate, **built}}))
    model.init_weights(0)
    gates = model.h[1].attn.pattern.gates
    if len(branches) == 1:
        assert gates is None
        return
    found = gates(torch.randn(2, 9, 32))
    assert found.shape == (len(branches), 2, 4, 9)
    torch.testing.assert_close(found, torch.full_like(found, 1 / len(branches)))
