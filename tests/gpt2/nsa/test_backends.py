"""Every backend, range and chunk size of the branches computes the same attention."""

import itertools
from dataclasses import replace

import pytest
import torch

from gpt2.nsa import block_major, gather
from gpt2.nsa.branches import attend_selected, attend_window
from gpt2.nsa.gather import (
    GatheredKeys,
    _attend_packed,
    attend_gathered,
    token_ranges,
    visible_tokens,
)
from gpt2.nsa.options import NsaOptions, merges_ranges, resolve_backend
from lib.errors import PreflightError
from tests.gpt2.builders import PARTS
from tests.gpt2.nsa.sizes import BACKENDS

OPTIONS = NsaOptions(**PARTS["nsa"])


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def selection(queries, length, size, count, touching):
    """Return blocks [1, 2, T, n]: the own block and earlier ones, random or adjacent to it."""
    lists = torch.full((1, 2, queries, count), -1)
    generator = torch.Generator().manual_seed(length)
    for head, t in itertools.product(range(2), range(queries)):
        own = (length - queries + t) // size
        earlier = torch.randperm(own, generator=generator)
        earlier = earlier.sort(descending=True).values if touching else earlier
        chosen = sorted({own, *earlier[: count - 1].tolist()})
        lists[0, head, t, : len(chosen)] = torch.tensor(chosen)
    return lists


def by_formula(q, k, v, blocks, size):
    """Return attention BKTgH from a mask of all pairs. q must be divided by √H already."""
    queries, length = q.shape[2], k.shape[2]
    tokens = torch.arange(length)
    chosen = (tokens // size == blocks[..., None]).any(3)
    seen = chosen & (tokens <= torch.arange(length - queries, length)[:, None])
    scores = torch.einsum("bktgh,bksh->bktgs", q, k).masked_fill(~seen[:, :, :, None], -torch.inf)
    return torch.einsum("bktgs,bksh->bktgh", scores.softmax(-1), v)


def with_gradients(attend, *leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out, *torch.autograd.grad((out * normal(*out.shape, seed=9)).sum(), leaves)]


class TestSelected:
    """Values and gradients of both backends equal the formula."""

    # Queries, tokens, tokens of a block, blocks.
    SHAPES = [(1, 1, 4, 3), (33, 33, 6, 4), (20, 33, 6, 4), (40, 40, 1, 3), (1, 50, 8, 5)]

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("touching", [True, False])
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_equals_the_formula(self, monkeypatch, shape, touching, backend):
        monkeypatch.setattr(block_major, "QUERIES_PER_TILE", 15)
        monkeypatch.setattr(block_major, "QUERIES_PER_VISIT", 7)
        monkeypatch.setattr(gather, "CHUNK_ELEMENTS", 500)
        queries, length, size, count = shape
        q, k, v = (
            normal(1, 2, queries, 3, 4),
            normal(1, 2, length, 4, seed=1),
            normal(1, 2, length, 4, seed=2),
        )
        blocks = selection(queries, length, size, count, touching)

        def attend(q, k, v):
            if backend == "blocks":
                return attend_selected(q, k, v, blocks, size)
            return attend_gathered(q, k, v, blocks, size, backend == "merged")

        expected = with_gradients(lambda *x: by_formula(*x, blocks, size), q, k, v)
        for found, right in zip(with_gradients(attend, q, k, v), expected, strict=True):
            torch.testing.assert_close(found, right, atol=1e-11, rtol=1e-11)

    @pytest.mark.parametrize("scale", [30.0, 3000.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_key_that_outweighs_the_own_one_by_far(self, scale, dtype):
        """Check that weights relative to the own key's score do not overflow."""
        q, k, v = normal(1, 1, 20, 2, 4), normal(1, 1, 20, 4, seed=1), normal(1, 1, 20, 4, seed=2)
        q, k, v = (x.to(dtype) for x in (q * scale, k, v))
        blocks = selection(20, 20, 4, 4, False)[:, :1]
        found = attend_selected(q, k, v, blocks, 4)
        exact = by_formula(q.double(), k.double(), v.double(), blocks, 4)
        assert found.isfinite().all()
        tolerance = 1e-11 if dtype == torch.float64 else 1e-5 * scale
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


class TestWindow:
    """Window attention of queries from any token on, in chunks of any height."""

    @pytest.mark.parametrize("queries", [1, 5, 40])
    @pytest.mark.parametrize("window", [1, 6, 39, 40, 90])
    @pytest.mark.parametrize("elements", [0, 1 << 18])
    def test_equals_the_formula(self, monkeypatch, queries, window, elements):
        monkeypatch.setattr("gpt2.nsa.query_major.CHUNK_ELEMENTS", elements)
        monkeypatch.setattr("gpt2.nsa.query_major.MIN_CHUNK_ROWS", 7)
        q, k, v = normal(1, 4, queries, 4), normal(1, 2, 40, 4, seed=1), normal(1, 2, 40, 4, seed=2)

        def expected(q, k, v):
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            i, j = torch.arange(40 - queries, 40)[:, None], torch.arange(40)
            scores = (q @ k.mT / 2).masked_fill((j > i) | (j <= i - window), -torch.inf)
            return scores.softmax(-1) @ v

        right = with_gradients(expected, q, k, v)
        found = with_gradients(lambda q, k, v: attend_window(q / 2, k, v, window), q, k, v)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


class TestRanges:
    """Blocks as token ranges."""

    def test_blocks_that_touch(self):
        blocks = torch.tensor([[0, 1, 3, 4, 5], [0, 2, 4, -1, -1]])
        tokens = torch.tensor([22, 17])
        starts, ends, _ = token_ranges(blocks, tokens, 4, merged=False)
        assert starts.tolist() == [0, 4, 12, 16, 20, 0, 8, 16]
        assert ends.tolist() == [4, 8, 16, 20, 23, 4, 12, 18]
        starts, ends, lengths = token_ranges(blocks, tokens, 4, merged=True)
        assert starts.tolist() == [0, 12, 0, 8, 16]
        assert ends.tolist() == [8, 23, 4, 12, 18]
        assert lengths.tolist() == [19, 10]

    @pytest.mark.parametrize("count", [3, 9])
    def test_sizes_follow_from_positions(self, count):
        for start, stop in itertools.combinations(range(40), 2):
            seen = [min(count - 1, t // 5) * 5 + t % 5 + 1 for t in range(start, stop)]
            assert visible_tokens(start, stop, 5, count) == (sum(seen), max(seen))

    def test_adaptive_merges_from_a_length_on(self):
        options = replace(OPTIONS, ranges="adaptive", ranges_min=100)
        assert [merges_ranges(options, length) for length in (99, 100)] == [False, True]
        assert merges_ranges(replace(OPTIONS, ranges="merged"), 1) and not merges_ranges(
            OPTIONS, 10**6
        )


class TestChoice:
    """Selection of the backend by device."""

    @pytest.mark.parametrize(("installed", "expected"), [(True, "triton"), (False, "gather")])
    def test_by_device(self, monkeypatch, installed, expected):
        monkeypatch.setattr("gpt2.nsa.options.find_spec", lambda name: installed or None)
        assert resolve_backend(OPTIONS, "cpu") == "blocks"
        assert resolve_backend(OPTIONS, "cuda") == expected
        alone = replace(OPTIONS, backend="", branch_selected=False)
        assert resolve_backend(alone, "cpu") == ""
        assert resolve_backend(alone, "cuda") == ("triton" if installed else "")
        assert resolve_backend(replace(OPTIONS, backend="gather"), "cpu") == "gather"

    @pytest.mark.parametrize(
        ("backend", "device", "code"),
        [
            ("triton", "cpu", "gpu.unsupported"),
            ("triton", "cuda", "env.missing-package"),
            ("gather", "mps", "gpu.unsupported"),
        ],
    )
    def test_refused(self, monkeypatch, backend, device, code):
        monkeypatch.setattr("gpt2.nsa.options.find_spec", lambda name: None)
        with pytest.raises(PreflightError) as caught:
            resolve_backend(replace(OPTIONS, backend=backend), device)
        assert caught.value.codes == [code]
        if code == "gpu.unsupported":
            assert f"{device!r}" in caught.value.problems[0].what
            assert "SET=NSA_BACKEND_BLOCKS=y" in caught.value.problems[0].next


def packed_attention(q, k, v, starts_q, starts_k, scale):
    """Attend row by row, in float64: the definition of torch's varlen_attn."""
    rows = []
    for i in range(len(starts_q) - 1):
        (q0, q1), (k0, k1) = starts_q[i : i + 2].tolist(), starts_k[i : i + 2].tolist()
        weights = (q[q0:q1, 0].double() @ k[k0:k1, 0].double().T * scale).softmax(-1)
        rows.append(weights @ v[k0:k1, 0].double())
    return torch.cat(rows)[:, None].to(q.dtype)


@pytest.mark.parametrize("has_scale", [True, False])
def test_packed_queries_are_rounded_once_if_torch_takes_a_scale(monkeypatch, has_scale):
    given = []

    def with_scale(q, k, v, starts_q, starts_k, max_q, max_k, *, scale=None):
        given.append(q)
        assert scale is not None
        return packed_attention(q, k, v, starts_q, starts_k, scale)

    def without_scale(q, k, v, starts_q, starts_k, max_q, max_k):
        given.append(q)
        return packed_attention(q, k, v, starts_q, starts_k, q.shape[-1] ** -0.5)

    function = with_scale if has_scale else without_scale
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
    keys = GatheredKeys((0, 0, slice(3)), (), torch.arange(9), torch.tensor([3, 1, 5]), 5)
    q, k, v = (normal(*size, 8, seed=i).bfloat16() for i, size in enumerate(((3, 2), (9,), (9,))))
    q = q * 8**-0.5
    found = _attend_packed(q, k, v, keys)
    starts = torch.tensor([0, 2, 4, 6]), torch.tensor([0, 3, 4, 9])
    expected = packed_attention(q.reshape(-1, 1, 8), k[:, None], v[:, None], *starts, 1.0)
    assert torch.equal(given[0], q.reshape(-1, 1, 8)) == has_scale
    torch.testing.assert_close(found, expected.view(3, 2, 8), rtol=0, atol=0 if has_scale else 0.02)
