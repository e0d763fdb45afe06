"""Evaluation against a plain recomputation, and the traces it must not leave."""

import math
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from gpt2.data.evaluation import evaluation_windows
from gpt2.evaluate import DocumentLoss, Evaluation
from gpt2.training.session import Session
from lib.repro.rng import rng_state

Open = Callable[..., Session]


def test_documents_agree_with_a_plain_loop(session: Open) -> None:
    opened = session()
    found = opened.evaluate(opened.model)
    split, model = opened.dataset.val, opened.model.eval()
    expected: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for window in evaluation_windows(split, 16, 300):
        tokens = torch.from_numpy(split.window(window.offset, window.length).astype("int64"))
        with torch.no_grad():
            logits = model(tokens[None, :-1])[0].double()
        right = tokens[1:]
        row = expected[window.document]
        row[0] += len(right)
        row[1] += int((logits.argmax(-1) == right).sum())
        row[2] -= float(torch.log_softmax(logits, -1)[range(len(right)), right].sum())
    assert [d.document for d in found.documents] == sorted(expected)
    assert len(expected) > 1
    for document in found.documents:
        tokens, correct, loss = expected[document.document]
        assert (document.n_tokens, document.n_correct) == (tokens, correct)
        assert document.loss_sum == pytest.approx(loss, rel=1e-5)
    assert found.tokens == sum(row[0] for row in expected.values())
    # Windows differ in length, so a mean over windows or batches would be another number.
    assert found.loss == pytest.approx(
        sum(row[2] for row in expected.values()) / found.tokens, rel=1e-6
    )


def test_the_loss_is_weighted_by_tokens() -> None:
    short, long = DocumentLoss("a", 1, 1, 5.0), DocumentLoss("b", 9, 4, 9.0)
    assert Evaluation((short, long)).loss == 14 / 10
    assert Evaluation((short, long)).accuracy == 0.5


def test_randomness_and_mode_are_left_alone(session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session()
    measure = opened.model.token_losses

    def drawing(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert not opened.model.training
        torch.rand(3)
        return measure(*arguments)

    monkeypatch.setattr(opened.model, "token_losses", drawing)
    opened.model.train()
    before = rng_state(opened.device)["torch"]
    opened.evaluate(opened.model)
    assert torch.equal(rng_state(opened.device)["torch"], before)
    assert opened.model.training
    assert all(p.grad is None for p in opened.model.parameters())


def test_two_evaluations_are_equal(session: Open) -> None:
    opened = session(DROPOUT="0.5")
    first = opened.evaluate(opened.model)
    torch.rand(7)
    assert opened.evaluate(opened.model) == first
    assert math.isfinite(first.loss)


def test_a_stop_gives_up_between_batches(session: Open) -> None:
    opened = session()
    asked = iter([False, False, True])
    assert opened.evaluate(opened.model, lambda: next(asked)) is None
    assert opened.model.training
