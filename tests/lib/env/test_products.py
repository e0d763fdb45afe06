"""Products of bf16 matrices in fp32 have torch's values, types and errors."""

import pytest
import torch
from torch.nn import functional as F

from lib.env.machine import NarrowProducts

# One unit in the last place of bf16.
_ULP = 2.0**-7


def layers(dtype):
    """Return outputs and gradients of linear layers with and without a bias."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in ((2, 9, 16), (24, 16), (24,))]
    x, w, b = (each.to(dtype).requires_grad_() for each in tensors)
    outputs = [F.linear(x, w, b), F.linear(x, w)]
    gradients = torch.autograd.grad([out.sum() for out in outputs], (x, w, b))
    return [*(out.detach() for out in outputs), *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_keep_their_bits_or_narrow_ones_but_for_one_rounding(dtype):
    before = layers(dtype)
    products = NarrowProducts()
    after = layers(dtype)
    products.restore()
    tolerance = {"rtol": _ULP, "atol": 1e-6} if dtype is torch.bfloat16 else {"rtol": 0, "atol": 0}
    for expected, actual in zip(before, after, strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)


def test_a_narrow_product_is_the_rounded_exact_one_and_two_types_are_refused(monkeypatch):
    products = NarrowProducts()
    x, w = torch.tensor([[1.0, 2.0**-8]]).bfloat16(), torch.tensor([[1.0], [1.0]]).bfloat16()
    # Half a unit, rounded to even, and with a third term a little more than half.
    assert float(x @ w) == 1.0
    x, w = (torch.cat([x, x[:, 1:]], 1), torch.cat([w, w[1:]]))
    assert float(x @ w) == 1.0 + _ULP
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.zeros(2, 2).bfloat16() @ torch.zeros(2, 2)
    products.restore()
    # Then the kernels of torch are used again, also those of other objects.
    monkeypatch.setattr("lib.env.machine._product", pytest.fail)
    products = NarrowProducts()
    products.restore()
    assert float(x @ w) == 1.0 + _ULP
