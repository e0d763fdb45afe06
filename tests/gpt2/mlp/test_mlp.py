"""MLP and mechanisms against their references."""

import dataclasses
from typing import Any

import pytest
import torch

from gpt2.attention.state import AttentionOutputs
from gpt2.mlp.activations import FUNCTIONS
from gpt2.mlp.gate import _running_mean
from gpt2.mlp.mlp import Mlp, reference_mlp
from gpt2.mlp.options import ACTIVATIONS
from tests.gpt2.builders import make_activation, make_model_config

BATCH, TOKENS = 2, 6
CROSS, LATENT, GATE = "mlp_cross_token", "mlp_latent", "mlp_attn_gate"
ALL = (CROSS, LATENT, GATE)

# name → mechanisms and their options
CASES: dict[str, tuple[tuple[str, ...], dict[str, dict[str, Any]]]] = {
    "dense": ((), {}),
    "gate": ((GATE,), {}),
    "gate-pooled": ((GATE,), {GATE: {"pooled": True}}),
    "cross": ((CROSS,), {}),
    "latent-tied": ((LATENT,), {}),
    "latent-untied": ((LATENT,), {LATENT: {"tying": "untied"}}),
    "latent-scalar": ((LATENT,), {LATENT: {"tying": "scalar"}}),
    "all": (ALL, {}),
    "all-pooled-scalar": (ALL, {GATE: {"pooled": True}, LATENT: {"tying": "scalar"}}),
}
OFF = {name: {"alpha": 0.0} for name in ALL}


def build(config, block=0, seed=0):
    """Build a float64 MLP with random parameters, including constants."""
    torch.manual_seed(seed)
    mlp = Mlp(config.sites()[block], config.mlp).double()
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(0, 0.3)
    return mlp


def inputs(config):
    """Return random float64 x, a view of causal weights and latents, and the leaf tensors."""
    torch.manual_seed(1)
    # R of the configurations built here: C/6 to a multiple of 8.
    shapes = (BATCH, TOKENS, config.shape.n_embd), (BATCH, TOKENS, TOKENS), (BATCH, TOKENS, 8)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    x_BTC, scores_BTS, latent_BTR = leaves
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights_BTS = scores_BTS.masked_fill(future, -torch.inf).softmax(-1)
    return x_BTC, AttentionOutputs(weights_BTS, latent_BTR), leaves


def outputs(out, state):
    """Return the output of the MLP and all state for the next block."""
    return [out, *(tensor for tensor in vars(state).values() if tensor is not None)]


def gradients(tensors, leaves):
    """Return the gradients of a random projection of all outputs."""
    torch.manual_seed(2)
    total = torch.stack([(t * torch.randn_like(t)).sum() for t in tensors]).sum()
    return list(torch.autograd.grad(total, leaves, materialize_grads=True, retain_graph=True))


def config_of(case, **overrides):
    """Build the configuration of a named case, with latent attention."""
    mechanisms, parts = CASES[case]
    return make_model_config("latent", mechanisms=mechanisms, parts=parts, **overrides)


@pytest.mark.parametrize("block", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_formula(case, activation, block):
    # 44 units are not a multiple of R = 8: the last chunk of the scalar tying is partial.
    config = config_of(case, hidden=44, activation=activation)
    mlp = build(config, block)
    x_BTC, view, leaves = inputs(config)
    wanted = [*mlp.parameters(), *leaves]

    fast = outputs(*mlp(x_BTC, view))
    site = config.sites()[block]
    slow = outputs(*reference_mlp(x_BTC, view, dict(mlp.named_parameters()), site, config.mlp))

    assert len(fast) == len(slow)
    for mine, its in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
    for mine, its in zip(gradients(fast, wanted), gradients(slow, wanted), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-11)


def test_the_gate_of_swiglu_scales_the_value_and_relu2_is_quadratic():
    swiglu, relu2 = (FUNCTIONS[type(make_activation(name))] for name in ("swiglu", "relu2"))
    gate, value = torch.randn(2, 5, 7).double()
    gated = swiglu(torch.cat([gate, value], -1))
    assert gated.shape == value.shape
    torch.testing.assert_close(swiglu(torch.cat([gate, 3 * value], -1)), 3 * gated)
    assert not swiglu(torch.cat([0 * gate, value], -1)).any()
    # A large gate passes: SiLU is the identity.
    torch.testing.assert_close(swiglu(torch.cat([0 * gate + 60, value], -1)), 60 * value)
    assert torch.equal(relu2(value) == 0, value < 0)
    torch.testing.assert_close(relu2(3 * value), 9 * relu2(value))


def test_only_cross_token_requests_attention_weights():
    asked = config_of("all", n_layer=3)
    parts = {CROSS: {"sparsity": "rms", "topk": 3, "tau": 0.7, "detach_weights": False}}
    custom = make_model_config(mechanisms=(CROSS,), parts=parts)

    requests = [asked.mlp.request(site) for site in asked.sites()]
    request, _ = [custom.mlp.request(site) for site in custom.sites()]

    assert [dataclasses.astuple(r) for r in requests] == [("topk", 8, 0.5, True)] * 3
    assert dataclasses.astuple(request) == ("rms", 3, 0.7, False)
    for case in ("dense", "gate", "latent-tied"):
        config = config_of(case)
        assert [config.mlp.request(site) for site in config.sites()] == [None, None]


def test_dropout_acts_in_training_only():
    config = make_model_config(dropout=0.5)
    mlp = build(config)
    x_BTC, view, _ = inputs(config)

    first, second = mlp(x_BTC, view)[0], mlp(x_BTC, view)[0]
    mlp.eval()

    assert not torch.equal(first, second)
    assert 0.3 < (first == 0).double().mean() < 0.7
    assert torch.equal(mlp(x_BTC, view)[0], mlp(x_BTC, view)[0])
    assert (mlp(x_BTC, view)[0] != 0).all()


def test_a_pooled_gate_is_averaged_in_fp32_under_autocast():
    mechanisms, parts = CASES["gate-pooled"]
    gate = build(make_model_config(mechanisms=mechanisms, parts=parts)).float().mechanisms[GATE]
    h_BTM = torch.randn(1, 600, gate.down.in_features)
    with torch.autocast("cpu", torch.bfloat16):
        bottleneck_BTG = gate.down(h_BTM)
        pooled_BTG = _running_mean(bottleneck_BTG, None)
    expected_BTG = bottleneck_BTG.float().cumsum(1) / torch.arange(1, 601)[:, None]
    torch.testing.assert_close(pooled_BTG, expected_BTG)


@pytest.mark.parametrize("tying", ["tied", "untied", "scalar"])
def test_the_latent_coupling_costs_two_flops_per_element_that_it_reads_or_writes(tying):
    """Both directions, and one in the last block; a scalar takes one product per hidden unit."""
    config = config_of(f"latent-{tying}")
    (options,) = config.mlp.mechanisms
    for block, directions in ((0, 2), (-1, 1)):
        site = config.sites()[block]
        elements = 1 if tying == "scalar" else options.latent_width(site)
        assert options.cost(40, 0, site).flops == 2 * directions * 40 * elements
