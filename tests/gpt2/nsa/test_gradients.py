"""Gradients of every parameter, finite differences, and split steps."""

import pytest
import torch

from gpt2.nsa import branches
from gpt2.nsa.module import BlockCompressionMLP, BranchGates, compress_blocks
from gpt2.nsa.select import attend_compressed
from gpt2.shape import ModelShape
from tests.gpt2.nsa.sizes import PAIR, attended, drawn, options


def shape():
    return ModelShape(1, 4, 16, 20, 64, 0.0, True, 50)


def randomized(module):
    """Return the module in float64 with random parameters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.normal_(0, 0.5)
    return module


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


class TestByDifferences:
    """torch.autograd.gradcheck in float64 with fixed block lists."""

    def test_selected(self, nsa, monkeypatch):
        q, k, v = drawn(1, 2, 13, 2), drawn(1, 1, 13, 2, seed=1), drawn(1, 1, 13, 2, seed=2)
        given, lists = nsa(compress=2, stride=1, select=2), []
        right = branches.attend_compressed

        def held(*given):
            context, blocks = right(*given)
            lists.append(blocks)
            return context, lists[0]

        monkeypatch.setattr(branches, "attend_compressed", held)
        arguments = [x.requires_grad_() for x in (q, k, v)]
        assert torch.autograd.gradcheck(
            lambda *qkv: attended(*qkv, given)["selected"], arguments, atol=1e-6
        )
        # One of blocks 1 to 4 was chosen, and it is not the first of them.
        assert lists[0][0, 0, -1].tolist() == [0, 3, 5, 6]

    def test_compressed(self):
        given = options(select=4, count=3)
        q, k, v = drawn(1, 2, 2, 9, 3), drawn(1, 2, 3, 3, seed=1), drawn(1, 2, 3, 3, seed=2)
        arguments = [x.requires_grad_() for x in (q, k, v)]
        assert torch.autograd.gradcheck(
            lambda *qkv: attend_compressed(*qkv, given)[0], arguments, atol=1e-6
        )

    def test_phi(self):
        phi = randomized(BlockCompressionMLP(shape(), options()))
        parameters = tuple(phi.parameters())
        x = drawn(1, 2, 9, 4).requires_grad_()
        assert torch.autograd.gradcheck(
            lambda x, *_: compress_blocks(x, options(), phi), (x, *parameters), atol=1e-6
        )

    @pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
    def test_gates(self, gate):
        gates = randomized(BranchGates(shape(), options(gate=gate)))
        x = drawn(1, 3, 16).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, *_: gates(x), (x, *gates.parameters()))
