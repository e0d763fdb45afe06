"""Native sparse attention with disabled branches and with random selection."""

import pytest
import torch

from gpt2.model import GPT
from gpt2.shape import ModelShape
from tests.gpt2.builders import SHAPE, make_model_config
from tests.gpt2.nsa.sizes import NAMES, PAIR, SUBSETS, options, pattern_of


@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_pairs_and_costs_are_of_what_is_built(branches):
    whole, part = options().pairs(33), pattern_of(branches).pairs(33)
    # Compressed keys rank blocks without a branch of their own.
    ranks = {"compressed"} if "selected" in branches else set[str]()
    assert part == tuple(p if n in {*branches} | ranks else 0 for n, p in zip(NAMES, whole))
    shape = ModelShape(**{**SHAPE, "block_size": 33, "bias": False})
    if ranks and "compressed" not in branches:
        kinds = [pattern_of(branches, shared_kv=True, select_by=by) for by in ("score", "random")]
        costs = [4 * shape.n_embd * o.mean_keys(33) + o.cost(shape, PAIR).flops for o in kinds]
        # q·k for each of them, and nothing else.
        assert costs[0] - costs[1] == pytest.approx(2 * shape.n_embd * whole[0] / 33)


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
