"""Gradients of every parameter, finite differences, and split steps."""

import pytest

from tests.gpt2.nsa.sizes import PAIR


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("phi", ["mean", "mlp"])
@pytest.mark.parametrize("shared", [True, False])
def test_every_parameter_has_one(build, nsa, gate, phi, shared):
    pattern = nsa(gate=gate, phi=phi, shared_kv=shared)
    case = build(23, projection=PAIR, pattern=pattern)
    case()[0].square().sum().backward()
    for name, parameter in case.module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # Each key head and each branch has its part of a matrix.
        rows = parameter.grad.flatten(1) if parameter.ndim > 1 else parameter.grad[:, None]
        assert rows.count_nonzero(), name
    c_kv = case.module.pattern.c_kv
    if c_kv is not None:
        assert all(part.count_nonzero() for part in c_kv.weight.grad.chunk(8))
