"""Attention across documents packed into one sequence."""

import pytest
import torch

from tests.gpt2.nsa.sizes import PAIR, options


@pytest.mark.parametrize("pattern", [None, options()], ids=["full", "nsa"])
def test_a_document_sees_those_before_it_as_in_full_attention(build, pattern):
    """Check that attention crosses document boundaries, as full attention does."""
    given = {} if pattern is None else {"pattern": pattern}
    case = build(33, projection=PAIR, **given)
    whole = case()[0][:, 12:]
    alone = case.module(case.x_BTC[:, 12:], case.state)[0]
    reaches = (whole - alone).abs().amax((0, 2))
    assert (reaches > 1e-3).all()
    (slope,) = torch.autograd.grad(whole[:, 15].sum(), case.x_BTC)
    assert slope[:, :12].count_nonzero()
