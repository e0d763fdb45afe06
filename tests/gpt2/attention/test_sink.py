"""Attention sink: limits of its logit, weights, statistics, backends that agree, refusals."""

import math

import pytest
import torch

from gpt2.attention.options import AttentionSinkOptions, GroupedOptions, SlidingOptions
from gpt2.mechanism_statistics import collect_statistics
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from tests.gpt2.test_mechanism_statistics import built, given_to, heads_of, tokens

SINK = (AttentionSinkOptions(),)


def logits(case, value):
    case.module.sinks["attention_sink"].logit.data.fill_(value)
    return case


@pytest.mark.parametrize("backend", ["auto", "rows"])
def test_a_low_logit_is_no_sink_and_a_high_one_takes_all_weight(build, backend):
    given = dict(projection=GroupedOptions(n_kv_head=2), backend=backend)
    without, case = build(**given), build(sinks=SINK, **given)
    case.module.load_state_dict(without.module.state_dict(), strict=False)
    case.x_BTC = without.x_BTC
    torch.testing.assert_close(logits(case, -200.0)()[0], without()[0], atol=1e-12, rtol=0)
    # All that remains is the bias of the output projection.
    bias_C = case.module.c_proj.bias.detach().expand_as(case.x_BTC)
    torch.testing.assert_close(logits(case, 200.0)()[0].detach(), bias_C, atol=1e-12, rtol=0)


def test_a_logit_of_0_is_the_softmax_off_by_one(build):
    case = logits(build(5, sinks=SINK, n_head=1, n_embd=4, batch=1), 0.0)
    case.x_BTC = case.x_BTC.detach()
    heads = case.module.c_attn(case.x_BTC, case.state)
    q, k, v = (x[0, 0] for x in (heads.q_BNTH, heads.k_BKTH, heads.v_BKTH))
    for i in range(5):
        weights = [math.exp((q[i] @ k[j]).item() / 2) for j in range(i + 1)]
        context = sum(w * v[j] for j, w in enumerate(weights)) / (1 + sum(weights))
        expected = case.module.c_proj(context)
        torch.testing.assert_close(case()[0][0, i], expected, atol=1e-12, rtol=0)


def test_half_precision_by_sdpa_follows_the_rows(build):
    given = dict(sinks=SINK, pattern=SlidingOptions(window=11), dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        by_sdpa, by_rows = build(**given)()[0], build(**given, backend="rows")()[0]
    assert (by_sdpa - by_rows).abs().max() <= 0.02 * by_rows.abs().max()


def test_statistics_are_those_of_the_weights_of_keys():
    model = built(sinks=("attention_sink",), gates=("ra_cross_token",))
    attention = model.h[1].attn
    q, k = heads_of(attention, given_to(model, attention)[0])
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp().masked_fill(hidden, 0.0)
    logit = attention.sinks["attention_sink"].logit[:, None, None]
    p = weights / (weights.sum(-1, keepdim=True) + logit.exp())
    statistics = collect_statistics(model, tokens(model))
    found = [statistics[name][1] for name in ("attention/entropy", "attention_sink/share")]
    entropy, share = -torch.xlogy(p, p).sum(-1).mean(), (1 - p.sum(-1)).mean()
    assert found == pytest.approx([entropy.item(), share.item()], rel=1e-9)
    assert 0.05 < share < 0.95


def test_sparse_attention_refuses_a_sink():
    given = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    layer = ConfigLayer.of("defconfig", "test", given | {"ATTENTION_SINK": True})
    with pytest.raises(ConfigError) as caught:
        KconfigTree().resolve([layer])
    (problem,) = caught.value.problems
    assert problem.code == "config.unmet-dependency"
    assert problem.what.startswith("ATTENTION_SINK=y: needs ATTENTION_PATTERN_NSA=n")
