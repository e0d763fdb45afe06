"""The fused form equals the other backends; its kernels are replaced by formulas over all pairs."""

import math
from dataclasses import replace

import pytest
import torch

from gpt2.nsa.branches import FusedKernels, attend_branches, attend_fused
from gpt2.nsa.cache import BranchKeyValues
from gpt2.nsa.options import NsaOptions
from gpt2.nsa.select import chosen_blocks
from gpt2.running import kernel_checks
from gpt2.running.kernel_checks import check_attention
from lib.errors import PreflightError
from tests.gpt2.attention.test_forms import CPU
from tests.gpt2.builders import PARTS, make_model_config
from tests.gpt2.nsa.test_backends import by_formula, normal

OPTIONS = NsaOptions(**PARTS["nsa"])


def visible(sight):
    """Return whether each query sees each key, by the definition of ``MaskSpec``."""
    tokens = sight.first + torch.arange(sight.queries)[:, None]
    ends = torch.arange(sight.keys) * sight.stride + sight.size - 1
    seen = ends <= tokens
    later = seen.flip(1).cumsum(1).flip(1)
    return seen if sight.window is None else seen & (later <= sight.window)


def all_pairs(q, k, v, sight, scale):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~visible(sight), -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.clamp_min(-1e30)[..., None]).exp() @ v, lse


def band(q_BTKgH, k_BMKH, v_BMKH, sight, scale):
    q_BNTH = q_BTKgH.flatten(2, 3).transpose(1, 2)
    context_BNTH, lse_BNT = all_pairs(
        q_BNTH, *(x.transpose(1, 2) for x in (k_BMKH, v_BMKH)), sight, scale
    )
    groups = q_BTKgH.shape[2:4]
    context, lse = (x.transpose(1, 2).unflatten(2, groups) for x in (context_BNTH, lse_BNT))
    return context, lse / math.log(2)


def ranked(q_BTKgH, k_BMKH, logsums, sight, scale, size, count):
    """Return the blocks that the CPU selects, which computes the log-sums anew."""
    options = replace(OPTIONS, compress=sight.size, stride=sight.stride, select=size, count=count)
    q_BKgTH = (q_BTKgH * scale).permute(0, 2, 3, 1, 4)
    return chosen_blocks(q_BKgTH, (k_BMKH.transpose(1, 2),), options, sight.first, 0)


def selected(q_BTKgH, k_BSKH, v_BSKH, blocks_BKTn, size, scale):
    qkv = (x.transpose(1, 2) for x in (q_BTKgH * scale, k_BSKH, v_BSKH))
    return by_formula(*qkv, blocks_BKTn, size).transpose(1, 2)


KERNELS = FusedKernels(band, ranked, selected)
VARIANTS = {
    "all": {},
    "random": {"select_by": "random"},
    "ranked by keys alone": {"branch_compressed": False},
    "window alone": {"branch_compressed": False, "branch_selected": False},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("queries", "first"), [(60, 0), (1, 0), (20, 40)])
def test_equals_the_other_backends(changes, queries, first):
    options = replace(OPTIONS, **changes)
    tokens = queries + first
    blocks = options.compressed(tokens)
    lengths = (blocks, blocks, tokens, tokens, tokens, tokens)
    pairs = [normal(2, 2, n, 8, seed=i + 1).requires_grad_() for i, n in enumerate(lengths)]
    q = normal(2, 4, queries, 8).requires_grad_()
    compressed = tuple(pairs[:2]) if options.branch_compressed else (pairs[0],)
    keys = BranchKeyValues(
        compressed if options.compresses else None,
        tuple(pairs[2:4]) if options.branch_selected else None,
        tuple(pairs[4:]),
    )
    expected = attend_branches(q, keys, options, first)
    found = attend_fused(q, keys, options, first, 0, KERNELS)
    leaves = [q, *pairs]
    gradients = [
        torch.autograd.grad(
            sum((x * normal(*x.shape, seed=7)).sum() for x in out),
            leaves,
            allow_unused=True,
            materialize_grads=True,
        )
        for out in (found, expected)
    ]
    for one, other in zip([*found, *gradients[0]], [*expected, *gradients[1]], strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


def wrong_queries(kernels):
    """Return kernels with a wrong output of every fifth query."""

    def band(q, k, v, sight, scale):
        context, logsums = kernels.band(q, k, v, sight, scale)
        changed = context.clone()
        changed[:, ::5] *= 1.02
        return changed, logsums

    return replace(kernels, band=band)


def other_blocks(kernels):
    """Return kernels that select the block before."""

    def ranked(*given):
        return (kernels.ranked(*given) - 1).clamp_min(0)

    return replace(kernels, ranked=ranked)


def other_block_of_a_query(kernels):
    """Return kernels that select another block for one query, as rounding may."""

    def ranked(*given):
        blocks = kernels.ranked(*given)
        blocks[:, :, -1, -1] = 0
        return blocks

    return replace(kernels, ranked=ranked)


def raising(kernels):
    def selected(*given):
        raise RuntimeError("out of shared memory")

    return replace(kernels, selected=selected)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda kernels: kernels, None),
        (other_block_of_a_query, None),
        (wrong_queries, "gpu.wrong-values"),
        (other_blocks, "gpu.wrong-values"),
        (raising, "gpu.unsupported"),
    ],
)
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_preflight_compares_the_kernels_in_float64(monkeypatch, change, code, changes):
    options = replace(OPTIONS, **changes)
    if not options.ranks and change in (other_blocks, other_block_of_a_query):
        pytest.skip("ranks no blocks")
    if not options.branch_selected and change is raising:
        pytest.skip("has no selected branch")
    if change is other_block_of_a_query:
        # Few of many tokens.
        options = replace(options, window=200)
    kernels = change(KERNELS)
    monkeypatch.setattr(kernel_checks, "gpu_kernels", lambda: kernels)
    monkeypatch.setattr(kernel_checks, "resolve_backend", lambda *_: "triton")
    model = make_model_config(n_embd=64, projection="grouped", pattern="nsa")
    model = replace(model, attention=replace(model.attention, pattern=options))
    if code is None:
        check_attention(model, CPU)
        return
    with pytest.raises(PreflightError) as caught:
        check_attention(model, CPU)
    assert caught.value.codes == [code]
    assert "SET=NSA_BACKEND_GATHER=y" in caught.value.problems[0].next
