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


def with_change(name, change):
    """Return kernels of which one has its result changed."""

    def kernel(*given):
        return change(getattr(KERNELS, name)(*given))

    return replace(KERNELS, **{name: kernel})


def wrong_queries(result):
    context_BTKgH, logsums = result
    factors_T = torch.ones(context_BTKgH.shape[1], dtype=context_BTKgH.dtype)
    factors_T[::5] = 1.02
    return context_BTKgH * factors_T[:, None, None, None], logsums


def another_block_of_the_last_query(blocks_BKTn):
    """As rounding may select it."""
    blocks_BKTn[:, :, -1, -1] = 0
    return blocks_BKTn


def failing(result):
    raise RuntimeError("out of shared memory")


EQUAL = (None, None, None)
WRONG = ("band", wrong_queries, "gpu.wrong-values")


@pytest.mark.parametrize(
    ("variant", "kernel", "change", "code"),
    [
        *((variant, *EQUAL) for variant in VARIANTS),
        *((variant, *WRONG) for variant in VARIANTS),
        ("all", "ranked", another_block_of_the_last_query, None),
        ("all", "ranked", lambda blocks: (blocks - 1).clamp_min(0), "gpu.wrong-values"),
        ("ranked by keys alone", "ranked", lambda x: (x - 1).clamp_min(0), "gpu.wrong-values"),
        ("random", "selected", failing, "gpu.unsupported"),
    ],
)
def test_preflight_compares_the_kernels_in_float64(monkeypatch, variant, kernel, change, code):
    options = replace(OPTIONS, **VARIANTS[variant])
    if change is another_block_of_the_last_query:
        # Few of many tokens.
        options = replace(options, window=200)
    kernels = with_change(kernel, change) if kernel else KERNELS
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
