"""Rotary positions: a compressed key has the position of its block's first token."""

import pytest
import torch

from gpt2.attention.options import RopeOptions
from gpt2.attention.positions import Rope
from gpt2.nsa.module import compress_blocks
from gpt2.nsa.select import chosen_blocks
from tests.gpt2.nsa.sizes import PAIR, SIZES, options

ROPE = RopeOptions(base=50.0)


@pytest.fixture
def rotating(build):
    """Return a builder of attention with rotary positions."""

    def make(length=27, **given):
        return build(length, projection=PAIR, positions=ROPE, **given)

    return make


class TestPositions:
    """Position of every key."""

    def scored(self, case, shift):
        """Return queries and keys of a whole sequence, shifted by ``shift`` tokens."""
        pattern = case.module.pattern
        heads = case.module.c_attn(case.x_BTC, case.state)
        right = pattern.positions
        with pytest.MonkeyPatch.context() as patch:

            def later(x, first=0, step=1):
                return right(x, first + shift, step)

            patch.setattr(pattern, "positions", later)
            keys = pattern._keys(pattern._raw(case.x_BTC, heads))
            return pattern.positions(heads.q_BNTH), keys

    @pytest.mark.parametrize("shared", [True, False])
    def test_scores_of_every_branch_depend_on_distances(self, rotating, shared):
        case = rotating(pattern=options(shared_kv=shared))
        (q, keys), (q_later, keys_later) = (self.scored(case, shift) for shift in (0, 1000))
        assert float((q_later - q).detach().abs().max()) > 0.1
        for name in ("compressed_BKMH", "selected_BKSH", "window_BKSH"):
            k, k_later = (
                vars(found)[name][0].repeat_interleave(2, 1) for found in (keys, keys_later)
            )
            torch.testing.assert_close(q_later @ k_later.mT, q @ k.mT, rtol=0, atol=1e-9)
        values = [(vars(found)["selected_BKSH"][1]) for found in (keys, keys_later)]
        assert torch.equal(*values)

    @pytest.mark.parametrize("phi", ["mean", "mlp"])
    def test_a_compressed_key_stands_at_its_blocks_first_token(self, rotating, phi):
        case = rotating(pattern=options(phi=phi))
        pattern = case.module.pattern
        with torch.no_grad():
            heads = case.module.c_attn(case.x_BTC, case.state)
            raw = pattern._raw(case.x_BTC, heads)
            k_BKMH, v_BKMH = pattern._keys(raw).compressed_BKMH
            blocks = compress_blocks(raw["compressed"][0], pattern.options, pattern.phi_k)
        rope = Rope(case.shape, ROPE)
        for i in range(k_BKMH.shape[2]):
            one = rope(blocks[:, :, i : i + 1], i * SIZES["stride"])
            torch.testing.assert_close(k_BKMH[:, :, i : i + 1], one, rtol=0, atol=1e-12)
        assert torch.equal(
            v_BKMH, compress_blocks(raw["compressed"][1], pattern.options, pattern.phi_v)
        )

    def test_selection_is_that_of_rotated_scores(self, rotating, monkeypatch):
        """Check that statistics rank with the same queries and keys as training."""
        pattern = rotating(pattern=options(phi="mean", branch_compressed=False))
        ranked, right = [], chosen_blocks

        def note(q_BKgTH, compressed_BKMH, *given):
            ranked.append((q_BKgTH, compressed_BKMH[0]))
            return right(q_BKgTH, compressed_BKMH, *given)

        monkeypatch.setattr("gpt2.nsa.branches.chosen_blocks", note)
        monkeypatch.setattr("gpt2.nsa.module.chosen_blocks", note)
        with torch.no_grad():
            pattern()
            heads = pattern.module.c_attn(pattern.x_BTC, pattern.state)
            pattern.module.pattern.statistics(pattern.x_BTC, heads)
        trained, shown = ranked
        assert all(map(torch.equal, trained, shown))
