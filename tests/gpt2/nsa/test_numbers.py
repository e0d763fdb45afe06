"""Bit-reproducibility and half precision."""

import torch

from gpt2.nsa import select
from gpt2.nsa.select import attend_compressed, score_blocks
from tests.gpt2.nsa.sizes import drawn, options


class TestNumbers:
    """Bit-reproducibility and dtypes."""

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
