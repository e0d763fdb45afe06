"""A query sees exactly the tokens of the definition: no later one, and none fewer."""

import pytest
import torch

from gpt2.attention.nsa import blocks, compress, compressed, selected, window
from tests.gpt2.attention.nsa.sizes import PAIR, drawn, options


class TestWhatIsSeen:
    """Exactly the tokens of the definition: no later one, and none fewer."""

    length = 33

    def seen(self, of_values):
        """For each query the tokens whose values its output depends on."""
        v = drawn(1, 2, self.length, 4, seed=3).requires_grad_()
        out_NTH = of_values(v)[0]
        found = []
        for t in range(self.length):
            (slope,) = torch.autograd.grad(out_NTH[0, t].sum(), v, retain_graph=True)
            found.append(slope[0, 0].abs().sum(-1).nonzero().flatten().tolist())
        return found

    def test_window(self):
        q, k = drawn(1, 4, self.length, 4), drawn(1, 2, self.length, 4, seed=1)
        found = self.seen(lambda v: window.attend_window(q, k, v, 5))
        assert found == [list(range(max(0, t - 4), t + 1)) for t in range(self.length)]

    def test_compressed(self):
        given = options(phi="mean", compress=4, stride=2)
        q, k = drawn(1, 2, 2, self.length, 4), drawn(1, 2, self.length, 4, seed=1)
        keys = compress.compress(k, given, None)
        found = self.seen(
            lambda v: compressed.attend_compressed(
                q, keys, compress.compress(v, given, None), given
            )[0].flatten(1, 2)
        )
        # Blocks end with token 3, 5, 7 …; the last one that t sees ends with t or before.
        assert found == [list(range((t + 1) // 2 * 2 if t >= 3 else 0)) for t in range(self.length)]

    def test_selected(self):
        given = options(phi="mean")
        q, k = drawn(1, 2, 2, self.length, 4), drawn(1, 2, self.length, 4, seed=1)
        keys = compress.compress(k, given, None)
        blocks = compressed.attend_compressed(q, keys, keys, given)[1]
        chosen = [set(row) - {-1} for row in blocks[0, 0].tolist()]
        assert len(chosen[-1]) == 4 and len(set(map(frozenset, chosen[30:]))) > 1
        found = self.seen(
            lambda v: selected.attend_selected(q.transpose(2, 3), k, v, blocks, given.select)
            .transpose(2, 3)
            .flatten(1, 2)
        )
        expected = [[s for s in range(t + 1) if s // 6 in row] for t, row in enumerate(chosen)]
        assert found == expected

    @pytest.mark.parametrize("token", [0, 3, 12, 31])
    def test_no_gradient_to_a_later_token(self, build, thin_rows, token):
        case = build(33, projection=PAIR, pattern=options())
        (found,) = torch.autograd.grad(case()[0][:, token].sum(), case.x_BTC)
        assert found[:, token + 1 :].count_nonzero() == 0
        assert found[:, token].count_nonzero() > 0

    @pytest.mark.parametrize("scale", [1.0, 8.0, 100.0])
    def test_later_tokens_change_neither_selection_nor_output(self, build, scale):
        """Of ten blocks a query selects four; those of a later one must not tip the balance."""
        case = build(72, projection=PAIR, pattern=options(), n_head=6, n_embd=24)
        changed = case.x_BTC.detach().clone()
        changed[:, 60:] = scale * drawn(*changed[:, 60:].shape, seed=5)
        before, after = ((case.module(x, case.state)[0][:, :60]) for x in (case.x_BTC, changed))
        torch.testing.assert_close(after, before, atol=1e-12, rtol=1e-12)
        q, k = drawn(4, 2, 3, 72, 4), 2 * drawn(4, 2, 72, 4, seed=1)
        lists = []
        for factor in (1.0, scale):
            k[:, :, 60:] = factor * drawn(4, 2, 12, 4, seed=int(factor))
            keys = compress.compress(k, options(), None)
            lists.append(compressed.attend_compressed(q, keys, keys, options())[1][:, :, :60])
        assert torch.equal(*lists)

    def test_a_beginning_alone_gives_the_same(self, build):
        case = build(33, projection=PAIR, pattern=options())
        whole = case()[0]
        for stop in (1, 5, 6, 7, 18, 32):
            part = case.module(case.x_BTC[:, :stop], case.state)[0]
            torch.testing.assert_close(part, whole[:, :stop], atol=1e-12, rtol=1e-12)

    def test_sequences_of_a_batch_do_not_meet(self, build):
        case = build(33, batch=3, projection=PAIR, pattern=options())
        alone = case.module(case.x_BTC[1:2], case.state)[0]
        torch.testing.assert_close(alone[0], case()[0][1], atol=1e-12, rtol=1e-12)

    def test_no_later_token_is_seen_however_low_the_scores_are(self):
        """Scores of −10⁶: a mask that only adds a large number would point at what it hides."""
        given, q = options(phi="mean"), torch.ones(1, 2, 2, self.length, 4, dtype=torch.float64)
        k, v = torch.full((1, 2, self.length, 4), -5e5).double(), drawn(1, 2, self.length, 4)
        later = v.clone()
        later[:, :, 20:] += 1e3
        outputs = []
        for values in (v, later):
            keys = compress.compress(k, given, None)
            found, lists = compressed.attend_compressed(
                q, keys, compress.compress(values, given, None), given
            )
            chosen = selected.attend_selected(q.transpose(2, 3), k, values, lists, given.select)
            windowed = window.attend_window(q.flatten(1, 2), k, values, given.window)
            outputs.append((found[..., :20, :], chosen[:, :, :20], windowed[:, :, :20]))
        for before, after in zip(*outputs, strict=True):
            torch.testing.assert_close(after, before, atol=1e-9, rtol=1e-9)
