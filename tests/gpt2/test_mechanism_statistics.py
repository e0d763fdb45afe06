"""Mechanism statistics, against formulas computed by hand from the same inputs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpt2.attention.rows import ScoreChunks
from gpt2.mechanism_statistics import collect_statistics
from gpt2.model import GPT, Execution
from tests.gpt2.builders import EVERYTHING, make_model_config

T, WINDOW = 40, 7


def built(**parts):
    """Build a double-precision model with large random parameters and several chunks."""
    torch.manual_seed(3)
    model = GPT(make_model_config(block_size=T, **parts)).double().eval()
    model.set_execution(Execution(ScoreChunks(cpu_elements=1, min_rows=8)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    return model


def tokens(model):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(model.config.shape.vocab_size, (2, T), generator=generator)


def given_to(model, part):
    """Return the inputs of ``part`` in the statistics pass."""
    calls: list[tuple[Any, ...]] = []
    hook = part.register_forward_pre_hook(lambda _, inputs: calls.append(inputs))
    with torch.no_grad():
        model.hidden(tokens(model))
    hook.remove()
    return calls[0]


def by_hand(attention, x_BTC, seen, alpha):
    """Compute entropy, share and shift of every row, pair by pair, with a reciprocal term α."""
    q, k = (part.double() for part in heads_of(attention, x_BTC))
    root = math.sqrt(q.shape[-1])
    entropy, share, moved = [], [], []
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            for i in range(T):
                columns = [j for j in range(i + 1) if seen(i, j)]
                own = torch.stack([q[b, n, i] @ k[b, n, j] / root for j in columns])
                added = torch.stack(
                    [alpha * (q[b, n, j] @ k[b, n, i]) / root * (i - j <= WINDOW) for j in columns]
                )
                p, p0 = torch.softmax(own + added, 0), torch.softmax(own, 0)
                entropy.append(-(p * p.log()).sum())
                share.append((p * added.abs() / (added.abs() + own.abs())).sum())
                moved.append((p - p0).abs().sum() / 2)
    return [torch.stack(rows).mean() for rows in (entropy, share, moved)]


def heads_of(attention, x_BTC):
    """Return queries and keys of a dense projection, from its matrix."""
    n_head = attention.shape.n_head
    made = x_BTC @ attention.c_attn.weight.T + attention.c_attn.bias
    q, k, _ = (part.unflatten(-1, (n_head, -1)).transpose(1, 2) for part in made.chunk(3, -1))
    return q, k


PATTERNS: dict[str, Callable[[int, int], bool]] = {
    "full": lambda i, j: True,
    "sliding": lambda i, j: i - j < 11,
}


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_entropy_of_attention_and_effect_of_a_term(pattern):
    parts = {"reciprocal": {"window": WINDOW, "alpha": 0.4}, "sliding": {"window": 11}}
    model = built(pattern=pattern, terms=("reciprocal",), parts=parts)
    attention = model.h[1].attn
    x_BTC = given_to(model, attention)[0]
    expected = by_hand(attention, x_BTC, PATTERNS[pattern], 0.4)
    statistics = collect_statistics(model, tokens(model))
    names = ("attention/entropy", "reciprocal/share", "reciprocal/moved")
    assert [statistics[name][1] for name in names] == pytest.approx([e.item() for e in expected])
    assert statistics["reciprocal/moved"][1] > 0.1


@pytest.mark.slow
def test_without_a_term_every_backend_reports_entropy_only():
    model = built()
    assert {block.attn.backend for block in model.h} == {"sdpa"}
    statistics = collect_statistics(model, tokens(model))
    assert statistics.keys() == {"attention/entropy"}
    x_BTC = given_to(model, model.h[0].attn)[0]
    entropy = by_hand(model.h[0].attn, x_BTC, PATTERNS["full"], 0.0)[0]
    assert statistics["attention/entropy"][0] == pytest.approx(entropy.item())
    by_rows = built(attention_backend="rows")
    assert collect_statistics(by_rows, tokens(by_rows)) == statistics


def test_gates_on_rows():
    """RA-CT's gate, from the largest weight of each row."""
    ract = {"mode": "max", "apply": "output"}
    model = built(gates=("ra_cross_token",), parts={"ra_cross_token": ract})
    attention = model.h[0].attn
    gate = attention.gates["ra_cross_token"]
    gate.bias.data = torch.tensor([-6.0, 0.0, 0.5, 6.0]).double()
    q, k = heads_of(attention, given_to(model, attention)[0])
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    largest = scores.softmax(-1).amax(-1)
    g = 1 / (1 + (-gate.scale[:, None] * largest - gate.bias[:, None]).exp())
    check_gate(collect_statistics(model, tokens(model)), "ra_cross_token", g, layer=0)
    # The mode that takes the softmax again: the entropy is that of the second one.
    again = built(
        gates=("ra_cross_token",), parts={"ra_cross_token": {"mode": "max", "apply": "weights"}}
    )
    gate = again.h[0].attn.gates["ra_cross_token"]
    g = 1 / (1 + (-gate.scale[:, None] * largest - gate.bias[:, None]).exp())
    p = (scores * (0.8 + 0.2 * g[..., None])).softmax(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1).mean().item()
    statistics = collect_statistics(again, tokens(again))
    assert statistics["attention/entropy"][0] == pytest.approx(entropy)


@pytest.mark.parametrize("pooled", [False, True])
def test_the_gate_of_an_mlp(pooled):
    model = built(mechanisms=("mlp_attn_gate",), parts={"mlp_attn_gate": {"pooled": pooled}})
    gate = model.h[0].mlp.mechanisms["mlp_attn_gate"]
    h_BTM, *_ = given_to(model, gate)
    if pooled:
        h_BTM = torch.stack([h_BTM[:, : t + 1].mean(1) for t in range(T)], 1)
    g_BTN = 1 / (1 + (-(h_BTM @ gate.down.weight.T @ gate.up.weight.T + gate.bias)).exp())
    statistics = collect_statistics(model, tokens(model))
    check_gate(statistics, "mlp_attn_gate", g_BTN.transpose(1, 2), layer=0)
    assert statistics["mlp_attn_gate/gate_mean"][1] is None, "the last block has none"


def check_gate(statistics, name, g_BNT, layer):
    """Check mean, spread over tokens, and the closed and open fractions."""
    flat = g_BNT.detach().double().transpose(0, 1).flatten(1).tolist()
    every = [g for head in flat for g in head]
    deviations = [
        math.sqrt(sum((g - sum(head) / len(head)) ** 2 for g in head) / len(head)) for head in flat
    ]
    expected = {
        "gate_mean": sum(every) / len(every),
        "gate_std": sum(deviations) / len(flat),
        "gate_closed": sum(g < 0.05 for g in every) / len(every),
        "gate_open": sum(g > 0.95 for g in every) / len(every),
    }
    found = {what: statistics[f"{name}/{what}"][layer] for what in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    assert expected["gate_std"] > 0.01


def test_statistics_of_cross_token_and_latent_mixes():
    model = built(projection="latent", mechanisms=("mlp_cross_token", "mlp_latent"))
    cross, latent = (model.h[0].mlp.mechanisms[name] for name in ("mlp_cross_token", "mlp_latent"))
    h_BTM, view, *_ = given_to(model, cross)
    statistics = {
        name: layers[0] for name, layers in collect_statistics(model, tokens(model)).items()
    }
    w_BTS = view.weights_BTS
    added = 0.3 * (w_BTS @ h_BTM @ cross.down.weight.T @ cross.up.weight.T)
    assert statistics["mlp_cross_token/share"] == pytest.approx(
        (added.norm() / h_BTM.norm()).item()
    )
    kept = [sum(w > 0 for w in row) for rows in w_BTS.tolist() for row in rows]
    assert statistics["mlp_cross_token/kept"] == sum(kept) / len(kept)
    others = [1 - w_BTS[b, t, t].item() for b in range(2) for t in range(T)]
    assert statistics["mlp_cross_token/others"] == pytest.approx(sum(others) / len(others))
    h_BTM, view, *_ = given_to(model, latent)
    added = 0.2 * (view.latent_BTR @ latent.coupling.to_hidden.weight.T)
    assert statistics["mlp_latent/share"] == pytest.approx((added.norm() / h_BTM.norm()).item())


def test_every_mechanism_reports_and_nothing_is_changed():
    model = built(dropout=0.5, **EVERYTHING)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    generator, state = torch.get_rng_state(), vars(model.h[0].attn).copy()
    first = collect_statistics(model, tokens(model))
    mechanisms = {"attention", "reciprocal", "ra_cross_token"}
    mechanisms |= {"mlp_cross_token", "mlp_latent", "mlp_attn_gate"}
    assert {name.split("/")[0] for name in first} == mechanisms
    assert collect_statistics(model, tokens(model)) == first
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(part._forward_hooks for part in model.modules())
    assert vars(model.h[0].attn) == state
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]) and parameter.grad is None
    with pytest.raises(AssertionError, match="evaluation mode"):
        collect_statistics(model.train(), tokens(model))
