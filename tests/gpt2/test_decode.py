"""Decoding with a KV cache: equal to the full forward pass, with the declared cache size."""

from typing import Any

import pytest
import torch

from gpt2.model import GPT
from tests.gpt2.builders import make_model_config
from tests.gpt2.test_model import EVERY, drawn, tokens

GATE, CROSS, COUPLING, RACT = "mlp_attn_gate", "mlp_cross_token", "mlp_latent", "ra_cross_token"
TOLERANCE = 1e-10
# Windows are below it, so that something is always left out.
LENGTH = 12
# Tokens of each call: one by one; a long prompt; a short one and then several at a time.
CALLS = ((1,) * LENGTH, (10, 1, 1), (3, 4, 1, 2, 1, 1))


def decoded(model, idx_BT, calls):
    """Return the logits of all calls and the cache."""
    cache, found = model.new_cache(), []
    for part_BT in idx_BT.split(list(calls), 1):
        found.append(model.decode(part_BT, cache))
    assert cache.position == sum(calls)
    return torch.cat(found, 1), cache


def deviation(config, calls):
    """Return the deviation from the full forward pass."""
    model, idx_BT = drawn(config), tokens(config, length=sum(calls))
    with torch.no_grad():
        return float((decoded(model, idx_BT, calls)[0] - model(idx_BT)).abs().max())


@pytest.mark.parametrize("calls", CALLS, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_equals_the_forward_pass_however_the_tokens_are_split(name, calls):
    assert deviation(make_model_config(n_layer=3, **EVERY[name]), calls) <= TOLERANCE


RA: dict[str, Any] = {"terms": ("reciprocal",), "parts": {"reciprocal": {"window": 5}}}
# C = 32, N = 4, H = 8, R = 8, two key/value heads, b = 8.
KEPT: list[tuple[dict[str, Any], int]] = [
    ({"projection": "dense"}, 12 * 2 * 32),
    ({"projection": "grouped"}, 12 * 2 * 2 * 8),
    ({"projection": "latent"}, 12 * 2 * 8),
    ({"projection": "latent", "transforms": ("qk_norm",)}, 12 * 2 * 32),
    ({"projection": "latent", "value_mixes": ("value_residual",)}, 12 * 2 * 32),
    ({"projection": "grouped", "value_mixes": ("value_residual",)}, 12 * 2 * 2 * 8),
    ({"pattern": "sliding"}, 4 * 2 * 32),
    (RA, 12 * 2 * 32 + 5 * 32),
    ({"projection": "latent", **RA}, 12 * 2 * 8 + 5 * 4 * 8),
    ({"mechanisms": (CROSS,)}, 12 * (2 * 32 + 8)),
    ({"pattern": "sliding", "mechanisms": (CROSS,)}, 4 * (2 * 32 + 8)),
    ({"projection": "latent", "mechanisms": (COUPLING, GATE)}, 12 * 2 * 8),
]


@pytest.mark.parametrize(("parts", "expected"), KEPT)
def test_kept_elements(parts, expected):
    """Count keys and values, queries and bottlenecks of 12 tokens and one block."""
    model = drawn(make_model_config(n_layer=1, **parts))
    for calls in ((LENGTH,), (5, *[1] * (LENGTH - 5))):
        _, cache = decoded(model, tokens(model.config, batch=1, length=LENGTH), calls)
        assert sum(x.numel() for x in cache.blocks[0].kept.values()) == expected


@pytest.mark.parametrize("pattern", ["full", "sliding"])
def test_appending_a_token_does_not_copy_the_cache(pattern):
    """Append 200 tokens one by one: few reallocations, at most twice the live memory."""
    config = make_model_config("dense", pattern, n_layer=1, block_size=200)
    model = drawn(config)
    cache, moves, before = model.new_cache(), 0, None
    for token_B1 in tokens(config, length=200).split(1, 1):
        model.decode(token_B1, cache)
        run, kept = cache.blocks[0].runs["k"], cache.blocks[0].kept["k"]
        moves += run.room is not before
        before = run.room
        assert run.room.nbytes <= 2 * kept.nbytes + config.shape.n_embd * 2 * kept.itemsize
    assert moves <= (9 if pattern == "full" else 3 + 200 // 4)


@pytest.mark.parametrize("name", EVERY)
def test_bfloat16_follows_the_forward_pass(name):
    config = make_model_config(n_layer=3, **EVERY[name])
    model = GPT(config).eval()
    model.init_weights(0)
    idx_BT = tokens(config, length=LENGTH)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model(idx_BT)
        cache = model.new_cache()
        parts = [model.decode(part, cache) for part in idx_BT.split([3, 1, 1, 7], 1)]
    torch.testing.assert_close(
        torch.cat(parts, 1), whole, rtol=0, atol=0.02 * whole.abs().max().item()
    )
    assert next(iter(cache.blocks[0].kept.values())).dtype == torch.bfloat16


def test_more_tokens_than_the_context_fail():
    model = drawn(make_model_config())
    cache = model.new_cache()
    model.decode(tokens(model.config, length=16), cache)
    with pytest.raises(AssertionError, match="17 tokens"):
        model.decode(tokens(model.config, length=1), cache)
    with pytest.raises(AssertionError, match="evaluation mode"):
        model.train().decode(tokens(model.config, length=1), model.new_cache())
