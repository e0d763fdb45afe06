"""QK-norm: formula, combinations with projections, patterns and positions, decoding."""

import pytest
import torch

from gpt2.attention.options import QkNormOptions
from gpt2.attention.qk_norm import QkNorm
from gpt2.model import GPT
from gpt2.reference import reference_gpt
from tests.gpt2.builders import make_model_config

NORM = {"transforms": ("qk_norm",)}
COMBINATIONS = {
    "dense": {},
    "rope": {"positions": "rope"},
    "grouped, sliding": {"projection": "grouped", "pattern": "sliding"},
    "latent": {"projection": "latent", "terms": ("reciprocal",), "gates": ("ra_cross_token",)},
    "nsa, rope": {"projection": "grouped", "pattern": "nsa", "positions": "rope", "n_layer": 1},
}


def drawn(**given):
    """Return a model in float64 with random parameters, scales included."""
    torch.manual_seed(0)
    model = GPT(make_model_config(**NORM, **given)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3, 0.5)
    return model, torch.randint(model.config.shape.vocab_size, (2, 12))


@pytest.mark.parametrize("given", COMBINATIONS.values(), ids=COMBINATIONS)
def test_equals_its_reference_and_decodes_the_same(given):
    model, idx_BT = drawn(**given)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    slow, fast = reference_gpt(idx_BT, parameters, model.config), model(idx_BT)
    torch.testing.assert_close(fast, slow, atol=1e-9, rtol=1e-9)
    fast.square().sum().backward()
    slow.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, parameters[name].grad, atol=1e-7, rtol=1e-7, msg=lambda m, n=name: n + m
        )
    with torch.no_grad():
        cache = model.new_cache()
        parts = [model.decode(part, cache) for part in idx_BT.split([5, 1, 1, 5], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), fast.detach(), atol=1e-9, rtol=1e-9)


def test_half_precision_is_rounded_once():
    shape = make_model_config().shape
    norm = QkNorm(shape, QkNormOptions())
    x_BNTH = (torch.randn(2, 3, 5, shape.head_dim) * 100).bfloat16()
    found = norm.keys(x_BNTH)
    assert found.dtype == torch.bfloat16 and torch.equal(
        found, norm.keys(x_BNTH.float()).bfloat16()
    )
