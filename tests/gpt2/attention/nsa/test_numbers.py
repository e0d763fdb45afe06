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

    def test_a_batch_selects_what_its_rows_do(self):
        q, keys = drawn(5, 2, 3, 33, 4).float(), drawn(5, 2, 15, 4, seed=1).float()
        together = attend_compressed(q, keys, keys, options())[1]
        alone = [
            attend_compressed(*(x[b : b + 1] for x in (q, keys, keys)), options())[1]
            for b in range(5)
        ]
        assert torch.equal(torch.cat(alone), together)
        assert torch.equal(attend_compressed(q, keys, keys, options())[1], together)

    def test_narrow_numbers_without_autocast(self, build):
        """bfloat16 parameters: near the definition in fp32, finite before the first block is complete."""
        wide = build(33, projection=PAIR, pattern=options(), dtype=torch.float32)
        with torch.no_grad():
            for parameter in wide.module.parameters():
                parameter.mul_(0.3)
        exact = wide.reference()[0]
        narrow = wide.module.to(torch.bfloat16)(wide.x_BTC.bfloat16(), wide.state)[0].float()
        assert narrow[:, :3].isfinite().all()
        error = (narrow - exact).norm() / exact.norm()
        assert error < 2e-2
