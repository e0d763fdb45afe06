"""The retrieval task: its answers are where it says, and selection alone finds them."""

import pytest
import torch

from gpt2.validation import needle


def test_the_answer_stands_at_its_place():
    found = needle.draw(5, torch.Generator().manual_seed(0), test=True)
    told = found.idx_BT.unflatten(1, (12, 2, 8))[:, :, 0].flatten(1)
    asked = found.idx_BT.unflatten(1, (12, 2, 8))[:, :, 1].flatten(1) - needle._TOLD
    answer = told.gather(1, found.places_BQ)
    assert torch.equal(answer % 8, found.values_BQ)
    # Key and place of the question are those of what is told.
    assert torch.equal(answer // 8, asked)
    block_Q = torch.arange(96) // 8
    assert (found.places_BQ // 8 <= block_Q).all()
    # The mean of a block says nothing: every value stands in it once.
    assert (told.unflatten(1, (12, 8)).remainder(8).sort(-1).values == torch.arange(8)).all()


@pytest.mark.long
def test_selection_finds_what_chance_and_a_window_do_not():
    found = {arm: needle.train(arm, needle.STEPS, 0, lambda text: None) for arm in needle.ARMS}
    assert found["nsa"].far > 0.95
    assert found["random blocks"].far < 0.3 and found["window only"].far < 0.15
