"""Attention of a block: declared sizes, values without effect, one call of SDPA."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from gpt2.attention.options import (
    DenseOptions,
    FullOptions,
    GroupedOptions,
    LatentOptions,
    ReciprocalOptions,
    SlidingOptions,
)
from lib.errors import RunError

PROJECTION = {
    "dense": DenseOptions(),
    "grouped": GroupedOptions(n_kv_head=2),
    "latent": LatentOptions(latent_dim=6, shared_expansion=False),
    "latent_shared": LatentOptions(latent_dim=6, shared_expansion=True),
}
PATTERN = {"full": FullOptions(), "sliding": SlidingOptions(window=11)}


@pytest.mark.parametrize(
    ("projection", "bias", "learnable"),
    [
        ("dense", True, True),
        ("grouped", False, False),
        ("latent", True, False),
        ("latent_shared", False, True),
    ],
)
def test_declared_parameters_are_built(build, gate, projection, bias, learnable):
    parts = dict(terms=(ReciprocalOptions(0.3, 9, learnable),), gates=(gate(),))
    case = build(8, projection=PROJECTION[projection], bias=bias, n_embd=48, **parts)
    parameters = list(case.module.parameters())
    assert sum(p.numel() for p in parameters) == case.options.cost(case.shape, 0).params
    matrices = [p.numel() for p in parameters if p.ndim >= 2]
    assert sum(matrices) == case.options.cost(case.shape, 0).weights


@pytest.mark.parametrize("pattern", PATTERN)
def test_plain_attention_is_one_sdpa_call(build, monkeypatch, pattern):
    attend = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    case = build(33, pattern=PATTERN[pattern], dropout=0.25)
    case()
    case.module.eval()(case.x_BTC, case.state)
    calls = [call.kwargs for call in attend.call_args_list]
    assert [call["dropout_p"] for call in calls] == [0.25, 0.0]
    assert all(call.get("is_causal", False) == (pattern == "full") for call in calls)


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_backends_that_run_agree(build, backend):
    chosen = build(33, backend=backend, dtype=torch.float32)
    torch.testing.assert_close(chosen()[0], build(33, dtype=torch.float32)()[0])


@pytest.mark.parametrize("given", [dict(backend="efficient"), dict(backend="flash", dropout=0.5)])
def test_a_backend_that_cannot_run_is_an_error(build, given):
    with pytest.raises(RunError, match="ATTENTION_BACKEND_ROWS=y") as caught:
        build(9, dtype=torch.float32, **given)()
    assert caught.value.codes == ["attention.backend-unsupported"]


def test_other_errors_of_torch_keep_their_type(build, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of something")

    monkeypatch.setattr(F, "scaled_dot_product_attention", fail)
    with pytest.raises(RuntimeError, match="out of something") as raised:
        build(9)()
    assert not isinstance(raised.value, RunError)
