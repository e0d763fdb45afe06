"""The retrieval task: answers are at the stated positions, and only selection finds them."""

import pytest
import torch
import torch.nn.functional as F

from gpt2.model import GPT
from gpt2.nsa import needle, select

TOLD = 16


class Answers:
    """Fake model that answers some of the last 16 questions correctly and all others wrongly."""

    def __init__(self, sequences, right_BQ):
        self.answers_BQ = (sequences.values_BQ[:, -16:] + ~right_BQ) % 8

    def hidden(self, idx_BT):
        return torch.zeros(*idx_BT.shape, 1)

    def logits(self, hidden_BQC):
        return F.one_hot(needle._ANSWERS + self.answers_BQ, needle._VOCAB).float()


def exam(rows):
    """Return test sequences, and the tokens of question and answer for the last 16 questions."""
    sequences = needle.generate_sequences(rows, torch.Generator().manual_seed(0), test=True)
    late = [*range(16 * TOLD - 24, 16 * TOLD - 16), *range(16 * TOLD - 8, 16 * TOLD)]
    tokens = [
        [(asked, place // 8 * 16 + place % 8) for asked, place in zip(late, places, strict=True)]
        for places in sequences.places_BQ[:, -16:].tolist()
    ]
    return sequences, tokens


def test_the_answer_stands_at_its_place():
    found = needle.generate_sequences(5, torch.Generator().manual_seed(0), test=True)
    told = found.idx_BT.unflatten(1, (TOLD, 2, 8))[:, :, 0].flatten(1)
    asked = found.idx_BT.unflatten(1, (TOLD, 2, 8))[:, :, 1].flatten(1) - needle._NUM_FACTS
    answer = told.gather(1, found.places_BQ)
    assert torch.equal(answer % 8, found.values_BQ)
    # Key and place of the question are those of what is told.
    assert torch.equal(answer // 8, asked)
    block_Q = torch.arange(8 * TOLD) // 8
    assert (found.places_BQ // 8 <= block_Q).all()
    # The mean of a block says nothing: every value stands in it once.
    assert (told.unflatten(1, (TOLD, 8)).remainder(8).sort(-1).values == torch.arange(8)).all()


def test_far_is_what_only_a_selected_block_reaches():
    sequences, tokens = exam(32)
    # Further back than the window, 8 tokens, and two blocks of as many.
    far = torch.tensor([[asked - told > 24 and told >= 8 for asked, told in row] for row in tokens])
    first = torch.tensor([[told < 8 for _, told in row] for row in tokens])
    found = needle.evaluate(Answers(sequences, far), "nsa", sequences, 0.0)
    assert (found.far, found.first) == (1.0, 0.0)
    found = needle.evaluate(Answers(sequences, first), "nsa", sequences, 0.0)
    assert (found.far, found.first) == (0.0, 1.0)


def test_luck_is_counted_from_the_blocks_that_the_model_draws(monkeypatch):
    sequences, tokens = exam(512)
    drawn = []

    def recorded(*arguments):
        drawn.append(module_draws(*arguments))
        return drawn[-1]

    module_draws = select.random_blocks
    monkeypatch.setattr(select, "random_blocks", recorded)
    GPT(needle.model_config("random blocks")).hidden(sequences.idx_BT[:1])
    (lists,) = [blocks[0, 0].tolist() for blocks in drawn]
    hits = [
        told // 8 in lists[asked]
        for row in tokens
        for asked, told in row
        if asked - told > 24 and told >= 8
    ]
    nothing = Answers(sequences, torch.zeros(512, 16, dtype=torch.bool))
    luck = {arm: needle.evaluate(nothing, arm, sequences, 0.0).luck for arm in needle.VARIANTS}
    expected = 1 / 8 + 7 / 8 * sum(hits) / len(hits)
    assert luck == {"nsa": 1 / 8, "random blocks": pytest.approx(expected), "window only": 1 / 8}
    # Near chance, and yet not chance itself.
    assert 1 / 8 < expected < 1 / 8 + 0.04


@pytest.mark.long
def test_selection_finds_what_chance_and_a_window_do_not():
    found = {arm: needle.train_and_evaluate(arm, 400, 0) for arm in needle.VARIANTS}
    assert found["nsa"].far > 0.95
    for arm in ("random blocks", "window only"):
        # 6900 questions: 2 points are four standard errors.
        assert abs(found[arm].far - found[arm].luck) < 0.02
        assert found[arm].far < needle.chance() + 0.05
