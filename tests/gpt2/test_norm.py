"""The norms: RMSNorm against its formula and its invariances, and in a whole model."""

import pytest
import torch

from gpt2.model import GPT
from gpt2.norm import MODULES, REFERENCES
from tests.gpt2.builders import make_model_config

RMS = {"norm": "rmsnorm"}


def norm_of(**given):
    """Return a norm with random parameters in float64, and its formula."""
    config = make_model_config(**given)
    module = MODULES[type(config.norm)](config.shape).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 2.0)
    return module, REFERENCES[type(config.norm)]


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("given", [RMS, {}, {"bias": False}])
def test_values_and_gradients_equal_the_formula(given, size):
    """Also of rows so small that ε decides."""
    module, formula = norm_of(**given)
    x_BTC = (size * torch.randn(2, 3, 32).double()).requires_grad_()
    inputs = [x_BTC, *module.parameters()]
    found, expected = module(x_BTC), formula(x_BTC, dict(module.named_parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected)]
    for mine, its in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)


def test_rows_of_rmsnorm_have_a_unit_mean_square_and_keep_their_mean():
    config = make_model_config(**RMS)
    norm = GPT(config).double().ln_f
    x_BTC = 5 + 10 * torch.randn(2, 3, 32).double()
    out_BTC = norm(x_BTC)
    torch.testing.assert_close(
        out_BTC.square().mean(-1), torch.ones(2, 3).double(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(norm(3 * x_BTC), out_BTC, rtol=1e-6, atol=0)
    assert (norm(x_BTC + 7) - out_BTC).abs().max() > 0.1
    assert (out_BTC.mean(-1) * x_BTC.mean(-1) > 0).all()


def test_a_model_has_no_other_norm():
    model = GPT(make_model_config(**RMS))
    kinds = [type(module) for name, module in model.named_modules() if "ln_" in name]
    assert kinds == 5 * [torch.nn.RMSNorm]
    assert {norm.eps for norm in model.modules() if isinstance(norm, torch.nn.RMSNorm)} == {1e-5}
    assert not [name for name, _ in model.named_parameters() if "ln_" in name and "bias" in name]


def test_initial_scales_are_one_and_weights_are_those_of_layernorm():
    models = [GPT(make_model_config(norm=name)) for name in ("layernorm", "rmsnorm")]
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(3.0)
        model.init_weights(0)
    expected, found = (dict(model.named_parameters()) for model in models)
    assert expected.keys() - found.keys() == {n for n in expected if "ln_" in n and "bias" in n}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_model_decodes_what_it_computes():
    torch.manual_seed(0)
    model = GPT(make_model_config(**RMS)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.3, 0.5)
        idx_BT = torch.randint(50, (2, 12))
        cache = model.new_cache()
        parts = [model.decode(part, cache) for part in idx_BT.split([5, 1, 6], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(idx_BT), atol=1e-9, rtol=1e-9)
