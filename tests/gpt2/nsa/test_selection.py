"""Block selection."""

import itertools
import math
from itertools import pairwise

import pytest
import torch

from gpt2.nsa import lists, select
from gpt2.nsa.module import compress_blocks
from gpt2.nsa.select import attend_compressed, score_blocks, select_blocks
from tests.gpt2.nsa.sizes import attended, drawn, options
from tests.gpt2.nsa.test_backends import selection


class TestSelection:
    """Scores, forced blocks, ties."""

    @pytest.mark.parametrize(
        "sizes", [(32, 16, 64), (16, 8, 32), (32, 32, 64), (16, 16, 16), (6, 2, 8)]
    )
    def test_weights_count_as_far_as_they_overlap(self, sizes):
        compress_, stride, block = sizes
        given = options(compress=compress_, stride=stride, select=block)
        tokens = 5 * block
        count = given.compressed(tokens)
        alone = torch.eye(count, dtype=torch.float64)[None, None, None]
        found = score_blocks(alone, given, 5)[0, 0]
        for i, j in itertools.product(range(count), range(5)):
            low, high = max(i * stride, j * block), min(i * stride + compress_, (j + 1) * block)
            assert found[i, j] == max(0, high - low) / stride

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_of_equal_scores_the_first(self, dtype):
        scores = torch.full((1, 1, 40, 10), 0.125, dtype=dtype)
        chosen = select_blocks(scores, options(select=4, count=5), 0)[0, 0].tolist()
        assert chosen[3] == [0, -1, -1, -1, -1] and chosen[13] == [0, 1, 2, 3, -1]
        assert chosen[39] == [0, 1, 2, 8, 9]

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_nan_selects_as_many_blocks(self, sign):
        scores = torch.full((1, 1, 40, 10), math.nan).copysign(torch.tensor(sign))
        chosen = select_blocks(scores, options(select=4, count=5), 0)[0, 0]
        assert (chosen >= 0).sum(1).tolist() == [min(5, t // 4 + 1) for t in range(40)]

    def test_blocks_are_ranked_in_float32(self, monkeypatch):
        given = []
        monkeypatch.setattr(
            select, "score_blocks", lambda w, *rest: given.append(w) or score_blocks(w, *rest)
        )
        q, keys = drawn(1, 2, 3, 33, 4).bfloat16(), drawn(1, 2, 15, 4, seed=1).bfloat16()
        attend_compressed(q, keys, keys, options())
        sums = given[0][..., 3:, :].sum(-1)
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)

    def test_a_batch_selects_what_its_rows_do(self):
        q, keys = drawn(5, 2, 3, 33, 4).float(), drawn(5, 2, 15, 4, seed=1).float()
        together = attend_compressed(q, keys, keys, options())[1]
        alone = [
            attend_compressed(*(x[b : b + 1] for x in (q, keys, keys)), options())[1]
            for b in range(5)
        ]
        assert torch.equal(torch.cat(alone), together)
        assert torch.equal(attend_compressed(q, keys, keys, options())[1], together)


def lists_of(q, k, given):
    """Return the selected blocks of every query."""
    q_BKgTH = (q / q.shape[-1] ** 0.5).unflatten(1, (k.shape[1], -1))
    keys = compress_blocks(k, given, None)
    return attend_compressed(q_BKgTH, keys, keys, given)[1]


@pytest.mark.parametrize("scale", [1.0, 8.0, 100.0])
def test_later_tokens_change_no_selection(scale):
    """Four of ten blocks."""
    q, k, found = drawn(4, 6, 72, 4), 2 * drawn(4, 2, 72, 4, seed=1), []
    for seed, factor in ((5, 1.0), (6, scale)):
        k[:, :, 60:] = factor * drawn(4, 2, 12, 4, seed=seed)
        found.append(lists_of(2 * q, k, options())[:, :, :60])
    assert torch.equal(*found)


def test_later_tokens_are_not_seen_however_low_the_scores_are(nsa):
    """Check scores of −10⁶: an additive mask with a finite value would expose hidden keys."""
    q, k = torch.ones(1, 4, 33, 4).double(), torch.full((1, 2, 33, 4), -5e5).double()
    v = drawn(1, 2, 33, 4)
    later = v.clone()
    later[:, :, 20:] += 1e3
    before, after = (attended(q, k, values, nsa()) for values in (v, later))
    for name, found in after.items():
        torch.testing.assert_close(found[:, :, :20], before[name][:, :, :20], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rows", [5, 7, 40])
def test_lists_have_the_queries_of_each_block_by_tiles(monkeypatch, rows):
    monkeypatch.setattr(lists, "SEGMENT", 4)
    blocks = selection(33, 40, 6, 4, touching=False)
    total = 7
    by_block = lists.queries_by_block(blocks, total, rows)
    entries, starts, segments, owners = (x.tolist() for x in by_block)
    found, segment_owners = {}, []
    for owner, (begin, end) in enumerate(pairwise(starts)):
        for entry in entries[begin:end]:
            head, t = divmod(entry // 4, 33)
            assert owner == (t // rows * 2 + head) * total + blocks[0, head, t, entry % 4]
            found.setdefault(owner, []).append(t)
        count = segments[owner + 1] - segments[owner]
        assert count == -(-(end - begin) // 4)
        segment_owners += [owner] * count
    assert starts[-1] == (blocks >= 0).sum() and all(x == sorted(x) for x in found.values())
    assert owners[: len(segment_owners)] == segment_owners
    assert {*owners[len(segment_owners) :]} <= {len(starts) - 1}


@pytest.mark.parametrize("limit", [1, 6000, 1 << 30])
def test_chunks_are_whole_tiles_within_the_limit(monkeypatch, limit):
    monkeypatch.setattr(lists, "TILE_QUERIES", 3)
    monkeypatch.setattr(lists, "SEGMENT", 1)
    monkeypatch.setattr(lists, "PARTIAL_BYTES", limit)
    q, blocks = torch.empty(2, 33, 2, 3, 4), torch.zeros(2, 2, 33, 4, dtype=torch.long)
    chunks, rows = lists.query_chunks(q, blocks, 7)
    assert [c.start for c in chunks] == [
        sum(c.length for c in chunks[:i]) for i in range(len(chunks))
    ]
    assert sum(c.length for c in chunks) == 33
    assert chunks[-1].stop_owner == -(-33 // rows) * 2 * 2 * 7
    for chunk in chunks:
        assert chunk.start % rows == 0 and chunk.first_owner == chunk.start // rows * 2 * 2 * 7
        assert chunk.length * 4 * 2 * 2 * 3 * 4 * 4 <= limit or chunk.length == 1
        assert chunk.segments >= chunk.stop_owner - chunk.first_owner
