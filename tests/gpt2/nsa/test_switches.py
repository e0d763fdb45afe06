"""Native sparse attention with disabled branches and with random selection."""

import itertools

import pytest
import torch

from gpt2.model import GPT
from gpt2.nsa.options import NsaOptions
from gpt2.nsa.reference import random_rank, top_blocks
from gpt2.nsa.select import random_blocks
from gpt2.shape import ModelShape
from tests.gpt2.builders import PARTS, SHAPE, make_model_config
from tests.gpt2.nsa.sizes import NAMES, PAIR, SUBSETS, every_form

CPU = torch.device("cpu")


def options(branches=NAMES, **given):
    """Return small sizes: 33 tokens are six blocks; of four selected blocks three are forced."""
    sizes = {"compress": 4, "stride": 2, "select": 6, "count": 4, "window": 5, "hidden": 3}
    built = {f"branch_{name}": name in branches for name in NAMES}
    return NsaOptions(**(PARTS["nsa"] | sizes | built | given))


@every_form
def test_what_is_built_is_what_is_declared(build, branches, kind, shared):
    """Check parameters and their gradients."""
    pattern = options(branches, select_by=kind, shared_kv=shared)
    case = build(20, projection=PAIR, pattern=pattern)
    parameters = dict(case.module.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == case.options.cost(case.shape).params
    matrices = sum(p.numel() for p in parameters.values() if p.ndim >= 2)
    assert matrices == case.options.cost(case.shape).weights
    whole = case()[0]
    slopes = torch.autograd.grad(whole.square().sum(), list(parameters.values()))
    assert [n for n, s in zip(parameters, slopes) if not s.count_nonzero()] == []


@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_pairs_and_costs_are_of_what_is_built(branches):
    whole, part = options().pairs(33), options(branches, shared_kv=True).pairs(33)
    # Compressed keys rank blocks without a branch of their own.
    ranks = {"compressed"} if "selected" in branches else set[str]()
    assert part == tuple(p if n in {*branches} | ranks else 0 for n, p in zip(NAMES, whole))
    shape = ModelShape(**{**SHAPE, "block_size": 33, "bias": False})
    if ranks and "compressed" not in branches:
        kinds = [options(branches, shared_kv=True, select_by=kind) for kind in ("score", "random")]
        costs = [4 * shape.n_embd * o.mean_keys(33) + o.cost(shape, PAIR).flops for o in kinds]
        # q·k for each of them, and nothing else.
        assert costs[0] - costs[1] == pytest.approx(2 * shape.n_embd * whole[0] / 33)


class TestDrawnBlocks:
    """Random selection: the first, the own and the previous block, and random others."""

    given = options(select_by="random", count=5)

    def blocks(self, layer=0, heads=2, first=0, length=80, **given):
        return random_blocks(
            options(**{**vars(self.given), **given}), layer, heads, first, length, CPU
        )

    def test_are_those_of_the_definition(self, monkeypatch):
        # Several chunks.
        monkeypatch.setattr("gpt2.nsa.select.CHUNK_ELEMENTS", 100)
        found = self.blocks(layer=3)
        assert found.shape == (1, 2, 80, 5)
        for head, t in itertools.product(range(2), range(80)):
            score = {j: float(random_rank(3, head, t, j)) for j in range(t // 6 + 1)}
            row = top_blocks(score, self.given)
            assert found[0, head, t].tolist() == row + [-1] * (5 - len(row))

    def test_a_part_draws_what_the_whole_does(self):
        whole = self.blocks()
        assert torch.equal(self.blocks(first=50, length=1), whole[:, :, 50:51])
        assert torch.equal(self.blocks(length=41), whole[:, :, :41])


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
