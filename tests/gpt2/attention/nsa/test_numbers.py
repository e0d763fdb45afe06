"""Numbers: the same bits twice, and narrow ones."""

import torch

from gpt2.attention.nsa import compressed
from gpt2.attention.nsa.blocks import score_blocks
from gpt2.attention.nsa.compressed import attend_compressed
from tests.gpt2.attention.nsa.sizes import PAIR, drawn, options


class TestNumbers:
    """Bits and types."""

    def test_twice_the_same_bits(self, build):
        case = build(33, projection=PAIR, pattern=options(), dtype=torch.float32)
        first, second = case(), case()
        assert torch.equal(first[0], second[0])
        assert all(map(torch.equal, case.gradients(first), case.gradients(second)))

    def test_bfloat16_is_near(self, build):
        case = build(33, projection=PAIR, pattern=options(), dtype=torch.float32)
        with torch.no_grad():
            for parameter in case.module.parameters():
                parameter.mul_(0.3)
        exact = case()[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = case()[0]
        assert rough.isfinite().all() and rough.dtype == torch.bfloat16
        torch.testing.assert_close(
            rough.float(), exact, rtol=0, atol=0.02 * exact.abs().max().item()
        )

    def test_blocks_are_ranked_in_float32(self, monkeypatch):
        given = []
        monkeypatch.setattr(
            compressed, "score_blocks", lambda w, *rest: given.append(w) or score_blocks(w, *rest)
        )
        q, keys = drawn(1, 2, 3, 33, 4).bfloat16(), drawn(1, 2, 15, 4, seed=1).bfloat16()
        attend_compressed(q, keys, keys, options())
        sums = given[0][..., 3:, :].sum(-1)
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)
