"""Receptive field: the tokens of the definition, and all of them as in full attention."""

import pytest
import torch

from gpt2.nsa.module import compress_blocks
from gpt2.nsa.select import attend_compressed
from tests.gpt2.nsa.sizes import attended, drawn, options

LENGTH = 33


def lists(q, k, given):
    """Return the selected blocks of every query."""
    q_BKgTH = (q / q.shape[-1] ** 0.5).unflatten(1, (k.shape[1], -1))
    keys = compress_blocks(k, given, None)
    return attend_compressed(q_BKgTH, keys, keys, given)[1]


class TestField:
    """Tokens whose values affect the outputs of the first key head's queries."""

    q, k = drawn(1, 4, LENGTH, 4), drawn(1, 2, LENGTH, 4, seed=1)

    def seen(self, branch, given):
        v = drawn(1, 2, LENGTH, 4, seed=3).requires_grad_()
        out_NTH = attended(self.q, self.k, v, given)[branch][0]
        found = []
        for t in range(LENGTH):
            (slope,) = torch.autograd.grad(out_NTH[:2, t].sum(), v, retain_graph=True)
            assert not slope[0, 1].count_nonzero()
            found.append(slope[0, 0].abs().sum(-1).nonzero().flatten().tolist())
        return found

    def test_window(self):
        found = self.seen("window", options())
        assert found == [list(range(max(0, t - 4), t + 1)) for t in range(LENGTH)]

    def test_compressed(self):
        found = self.seen("compressed", options())
        # Blocks end with token 3, 5, 7 …; the last one that t sees ends with t or before.
        assert found == [list(range((t + 1) // 2 * 2 if t >= 3 else 0)) for t in range(LENGTH)]

    def test_selected(self, nsa, thin_rows):
        chosen = [set(row) - {-1} for row in lists(self.q, self.k, nsa())[0, 0].tolist()]
        assert len(chosen[-1]) == 4 and len(set(map(frozenset, chosen[30:]))) > 1
        expected = [[s for s in range(t + 1) if s // 6 in row] for t, row in enumerate(chosen)]
        assert self.seen("selected", nsa()) == expected


class TestLaterTokens:
    """Later tokens change nothing, tested by gradients and by replacement."""

    @pytest.mark.parametrize("scale", [1.0, 8.0, 100.0])
    def test_change_no_selection(self, scale):
        """Check that later tokens do not affect which four of ten blocks a query selects."""
        q, k, found = drawn(4, 6, 72, 4), 2 * drawn(4, 2, 72, 4, seed=1), []
        for seed, factor in ((5, 1.0), (6, scale)):
            k[:, :, 60:] = factor * drawn(4, 2, 12, 4, seed=seed)
            found.append(lists(2 * q, k, options())[:, :, :60])
        assert torch.equal(*found)

    def test_are_not_seen_however_low_the_scores_are(self, nsa):
        """Check scores of −10⁶: an additive mask with a finite value would expose hidden keys."""
        q, k = torch.ones(1, 4, LENGTH, 4).double(), torch.full((1, 2, LENGTH, 4), -5e5).double()
        v = drawn(1, 2, LENGTH, 4)
        later = v.clone()
        later[:, :, 20:] += 1e3
        before, after = (attended(q, k, values, nsa()) for values in (v, later))
        for name, found in after.items():
            torch.testing.assert_close(
                found[:, :, :20], before[name][:, :, :20], atol=1e-9, rtol=1e-9
            )
