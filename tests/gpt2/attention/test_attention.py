"""Attention of a block: declared sizes, values without effect, one call of SDPA."""

import pytest
import torch
import torch.nn.functional as F

from gpt2.attention.cross_token import RaCrossToken
from gpt2.attention.options import (
    AttentionWeightsOptions,
    DenseOptions,
    FullOptions,
    GroupedOptions,
    LatentOptions,
    ReciprocalOptions,
    SlidingOptions,
)
from gpt2.attention.reciprocal import Reciprocal
from lib.errors import RunError

RA = (ReciprocalOptions(alpha=0.6, window=9, learnable=False),)
REQUEST = AttentionWeightsOptions("topk", topk=3, tau=0.0, detach=False)
PROJECTION = {
    "dense": DenseOptions(),
    "grouped": GroupedOptions(n_kv_head=2),
    "latent": LatentOptions(latent_dim=6, shared_expansion=False),
    "latent_shared": LatentOptions(latent_dim=6, shared_expansion=True),
}
PATTERN = {"full": FullOptions(), "sliding": SlidingOptions(window=11)}


@pytest.mark.parametrize("pattern", PATTERN)
def test_i7_off_is_plain_attention(build, gate, thin_chunks, pattern):
    plain = build(33, pattern=PATTERN[pattern])
    off = {
        "reciprocal": dict(terms=(ReciprocalOptions(alpha=0.0, window=9, learnable=False),)),
        "output": dict(gates=(gate("topk", "output", alpha=0.0),)),
        "weights": dict(gates=(gate("entropy", "weights", alpha=0.0),)),
    }
    for given in off.values():
        case = build(33, pattern=PATTERN[pattern], **given)
        case.module.load_state_dict(plain.module.state_dict(), strict=False)
        case.x_BTC = plain.x_BTC
        torch.testing.assert_close(case()[0], plain()[0], atol=1e-12, rtol=1e-12)
        for name, found in zip(case.leaves(), case.gradients(case())):
            if name in plain.leaves():
                expected = dict(zip(plain.leaves(), plain.gradients(plain())))[name]
                torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("projection", PROJECTION)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("learnable", [True, False])
def test_declared_parameters_are_built(build, gate, projection, bias, learnable):
    parts = dict(terms=(ReciprocalOptions(0.3, 9, learnable),), gates=(gate(),))
    case = build(8, projection=PROJECTION[projection], bias=bias, n_embd=48, **parts)
    parameters = list(case.module.parameters())
    assert sum(p.numel() for p in parameters) == case.options.cost(case.shape).params
    matrices = [p.numel() for p in parameters if p.ndim >= 2]
    assert sum(matrices) == case.options.cost(case.shape).weights


def test_names_are_those_of_gpt2(build, gate):
    parameters = set(dict(build(8).module.named_parameters()))
    assert parameters == {"c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"}
    case = build(8, terms=(ReciprocalOptions(0.3, 9, True),), gates=(gate(),))
    added = set(dict(case.module.named_parameters())) - parameters
    gates = {"gates.ra_cross_token.scale", "gates.ra_cross_token.bias"}
    assert added == {"terms.reciprocal.alpha"} | gates


def test_constants_start_as_configured(build, gate):
    shape = build(8).shape
    built = RaCrossToken(shape, gate(scale=1.5, bias=2.5))
    assert built.scale.tolist() == [1.5] * 4 and built.bias.tolist() == [2.5] * 4
    assert Reciprocal(shape, ReciprocalOptions(0.25, 9, True)).alpha.tolist() == [0.25] * 4


@pytest.fixture
def sdpa_calls(monkeypatch):
    calls = []
    real = F.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return calls


@pytest.mark.parametrize("pattern", PATTERN)
def test_plain_attention_is_one_sdpa_call(build, sdpa_calls, pattern):
    case = build(33, pattern=PATTERN[pattern], dropout=0.25)
    case()
    case.module.eval()(case.x_BTC, case.state)
    assert [call["dropout_p"] for call in sdpa_calls] == [0.25, 0.0]
    assert all(call.get("is_causal", False) == (pattern == "full") for call in sdpa_calls)


def test_terms_gates_and_requests_are_none(build, gate, sdpa_calls):
    for given in (dict(terms=RA), dict(gates=(gate(),)), dict(request=REQUEST)):
        build(9, **given)()
    assert sdpa_calls == []


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
