"""Training statistics of native sparse attention against independent computations."""

import math

import pytest
import torch

from gpt2.mechanism_statistics import HasStatistics, collect_statistics
from gpt2.nsa import reference
from gpt2.nsa.module import gate_statistics
from gpt2.nsa.select import chosen_blocks
from tests.gpt2.nsa.sizes import PAIR, POSITIONS, options
from tests.gpt2.test_mechanism_statistics import T, built, given_to, tokens

ALL = ("compressed", "selected", "window")


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_gates_of_sparse_attention(gate):
    model = built(projection="grouped", pattern="nsa", parts={"nsa": {"gate": gate}})
    nsa = model.h[0].attn.pattern
    x_BTC = given_to(model, nsa)[0]
    logits = (x_BTC @ nsa.gates.c_gate.weight.T + nsa.gates.bias).unflatten(-1, (3, 4))
    gates_BTcN = logits.softmax(2) if gate == "softmax" else logits.sigmoid()
    shares_BTcN = gates_BTcN / gates_BTcN.sum(2, keepdim=True)
    entropy_BTN = -(shares_BTcN * shares_BTcN.log()).sum(2)
    largest_BTN = shares_BTcN.amax(2)
    collapsed_BTN = (entropy_BTN < 0.1) & (largest_BTN > 0.95)
    values = {name: layers[0] for name, layers in collect_statistics(model, tokens(model)).items()}
    expected = {
        "nsa/gate_entropy": entropy_BTN.mean().item(),
        "nsa/gate_entropy_min": entropy_BTN.min().item(),
        "nsa/gate_largest": largest_BTN.mean().item(),
        "nsa/gate_largest_max": largest_BTN.max().item(),
        "nsa/gate_collapsed": collapsed_BTN.double().mean().item(),
        "nsa/gate_moved": (gates_BTcN - 1 / 3).abs().mean().item(),
    }
    names = ("nsa/share_cmp", "nsa/share_sel", "nsa/share_win")
    expected |= dict(zip(names, shares_BTcN.mean((0, 1, 3)).tolist()))
    # Gates are narrowed to single precision.
    found = {name: values[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert "attention/entropy" not in values


def test_selected_blocks():
    sizes = {"compress": 4, "stride": 2, "select": 4, "count": 5, "window": 6}
    model = built(projection="grouped", pattern="nsa", parts={"nsa": sizes})
    nsa = model.h[0].attn.pattern
    x_BTC, heads = given_to(model, nsa)[:2]
    with torch.no_grad():
        made = nsa._keys(nsa._raw(x_BTC, heads))
        keys = made.compressed_BKMH
        q_BKgTH = heads.q_BNTH.unflatten(1, (2, 2)) / math.sqrt(heads.q_BNTH.shape[-1])
        chosen = chosen_blocks(q_BKgTH, keys, nsa.options, 0, nsa.block)
    sets: dict[tuple[int, int, int], set[int]] = {}
    for b in range(2):
        for k in range(2):
            for t in range(T):
                seen = [i for i in range(keys[0].shape[2]) if 2 * i + 3 <= t]
                scores = q_BKgTH[b, k, :, t] @ keys[0][b, k, seen].T
                weights = scores.softmax(-1).sum(0).tolist() if seen else []
                sets[b, k, t] = set(reference.selected_blocks(t, weights, nsa.options))
                assert {j for j in chosen[b, k, t].tolist() if j >= 0} == sets[b, k, t]
    forced = {t: {0, t // 4, t // 4 - 1} for t in range(T)}
    free = [(t, j) for (_, _, t), found in sets.items() for j in found - forced[t]]
    every = [len(found) for found in sets.values()]
    overlaps = [
        len(found & sets[b, k, t - 1]) / len(found) for (b, k, t), found in sets.items() if t
    ]
    expected = {
        "nsa/blocks": sum(every) / len(every),
        "nsa/blocks_max": max(every),
        "nsa/chosen": len(free) / sum(every),
        "nsa/distance": sum(t - (4 * j + 3) for t, j in free) / len(free),
        "nsa/overlap": sum(overlaps) / len(overlaps),
    }
    values = {name: layers[0] for name, layers in collect_statistics(model, tokens(model)).items()}
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert 0 < expected["nsa/chosen"] < 1


def test_where_no_block_is_free_its_distance_is_left_out():
    model = built(projection="grouped", pattern="nsa")
    values = collect_statistics(model, tokens(model)[:, :4])
    assert values["nsa/distance"] == [None, None]


def test_collapsed_gates_are_counted():
    gates = torch.tensor([[1.0, 0.5], [1e-4, 0.5], [1e-4, 0.5]])[:, None, None]
    found = gate_statistics(gates, ALL)
    assert found["nsa/gate_collapsed"] == 0.5 and found["nsa/share_cmp"] > 0.6


def test_drawn_blocks_and_branches_that_are_not_built():
    drawn = built(projection="grouped", pattern="nsa", parts={"nsa": {"select_by": "random"}})
    values = collect_statistics(drawn, tokens(drawn))
    own = drawn.h[1].attn.pattern
    queries = torch.zeros(2, 2, 2, T, 8)
    blocks = chosen_blocks(queries, None, own.options, 0, 1)
    assert values["nsa/blocks"][1] == pytest.approx((blocks >= 0).sum(-1).float().mean().item())
    # Layers draw blocks of their own, of the same number.
    assert values["nsa/blocks"][0] == values["nsa/blocks"][1]
    assert values["nsa/distance"][0] != values["nsa/distance"][1]

    gated = {"select_by": "random", "branch_compressed": False}
    two = built(projection="grouped", pattern="nsa", parts={"nsa": gated})
    values = collect_statistics(two, tokens(two))
    assert "nsa/share_cmp" not in values
    shares = [values["nsa/share_sel"][0], values["nsa/share_win"][0]]
    assert sum(shares) == pytest.approx(1.0) and values["nsa/gate_entropy"][0] <= math.log(2)

    window = {"branch_compressed": False, "branch_selected": False, "select_by": "random"}
    alone = built(projection="grouped", pattern="nsa", parts={"nsa": window})
    assert isinstance(alone.h[0].attn.pattern, HasStatistics)
    assert collect_statistics(alone, tokens(alone)) == {}


def test_blocks_are_ranked_by_rotated_heads(build, monkeypatch):
    """Statistics rank with the same queries and keys as training."""
    pattern = options(phi="mean", branch_compressed=False)
    case = build(27, projection=PAIR, positions=POSITIONS[1], pattern=pattern)
    ranked, right = [], chosen_blocks

    def note(q_BKgTH, compressed_BKMH, *given):
        ranked.append((q_BKgTH, compressed_BKMH[0]))
        return right(q_BKgTH, compressed_BKMH, *given)

    monkeypatch.setattr("gpt2.nsa.branches.chosen_blocks", note)
    monkeypatch.setattr("gpt2.nsa.module.chosen_blocks", note)
    with torch.no_grad():
        case()
        heads = case.module.c_attn(case.x_BTC, case.state)
        case.module.pattern.statistics(case.x_BTC, heads)
    trained, shown = ranked
    assert all(map(torch.equal, trained, shown))
