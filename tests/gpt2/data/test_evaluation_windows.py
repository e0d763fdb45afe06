"""Evaluation windows: each held-out token once, no window across documents, no randomness."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.data.dataset import DocumentSpan, TokenSplit
from gpt2.data.evaluation_windows import (
    IGNORE_INDEX,
    evaluation_batches,
    evaluation_windows,
)
from lib.errors import ConfigError

LENGTHS = [1, 2, 8, 9, 10, 17, 100, 3, 1, 41]


class FakeSplit(SimpleNamespace):
    """A split whose tokens are their positions."""

    name = "val"

    def window(self, offset, length):
        """Return token positions as tokens."""
        assert offset >= 0 and offset + length <= self.n_tokens
        return np.arange(offset, offset + length, dtype=np.uint16)


def split(documents=True):
    """Return a split of consecutive documents of ``LENGTHS`` tokens."""
    starts = np.cumsum([0, *LENGTHS]).tolist()
    spans = [DocumentSpan(f"d{i}", starts[i], n, f"digest of {i}") for i, n in enumerate(LENGTHS)]
    return FakeSplit(n_tokens=starts[-1], documents=spans if documents else None)


def test_each_token_except_a_documents_first_is_predicted_once():
    held_out = split()
    windows = evaluation_windows(held_out, 8, 10**6)
    predicted = Counter()
    for window in windows:
        document = held_out.documents[window.document]
        assert 2 <= window.length <= 9
        assert document.offset <= window.offset
        assert window.offset + window.length <= document.offset + document.length
        predicted.update(range(window.offset + 1, window.offset + window.length))
    firsts = {d.offset for d in held_out.documents}
    assert predicted == Counter(p for p in range(held_out.n_tokens) if p not in firsts)


def test_budget_takes_a_prefix_that_mixes_documents():
    everything = evaluation_windows(split(), 8, 10**6)
    for budget in (8, 40, 100):
        windows = evaluation_windows(split(), 8, budget)
        assert windows == everything[: len(windows)]
        assert sum(w.predicted for w in windows) <= budget
        assert sum(w.predicted for w in everything[: len(windows) + 1]) > budget
    offsets = [w.offset for w in everything]
    assert offsets != sorted(offsets)


def reversed_split(factor):
    """Return the documents in reverse order, with ``factor`` times their tokens."""
    moved, start = split(), 0
    moved.documents.reverse()
    for i, document in enumerate(moved.documents):
        length = factor * document.length
        moved.documents[i] = DocumentSpan(document.id, start, length, document.digest)
        start += length
    return moved


def test_order_follows_the_text_not_the_place():
    def order(held_out):
        windows = evaluation_windows(held_out, 8, 10**6)
        return [(held_out.documents[w.document].id, w.length) for w in windows]

    assert order(reversed_split(1)) == order(split())


def test_budget_below_a_window():
    with pytest.raises(ConfigError) as caught:
        evaluation_windows(split(documents=False), 8, 7)
    assert caught.value.codes == ["config.out-of-range"]
    (problem,) = caught.value.problems
    assert problem.where == "EVAL_TOKENS" and "BLOCK_SIZE" in problem.next


def test_each_window_is_a_unit_without_documents():
    windows = evaluation_windows(split(documents=False), 8, 10**6)
    n_tokens = split().n_tokens
    assert len({w.document for w in windows}) == len(windows) == -(-(n_tokens - 1) // 8)
    assert {w.document for w in windows if w.offset == 24} == {3}
    assert sum(w.predicted for w in windows) == n_tokens - 1


def test_batches():
    windows = evaluation_windows(split(), 8, 10**6)
    rows = []
    for x_BT, y_BT in evaluation_batches(split(), windows, 8, 5):
        assert x_BT.shape == y_BT.shape == (len(x_BT), 8) and len(x_BT) <= 5
        assert x_BT.dtype == y_BT.dtype == np.int64
        rows += zip(x_BT, y_BT, strict=True)
    assert len(rows) == len(windows)
    for (x_T, y_T), window in zip(rows, windows, strict=True):
        n = window.length - 1
        tokens = list(range(window.offset, window.offset + window.length))
        assert x_T.tolist() == tokens[:-1] + [0] * (8 - n)
        assert y_T.tolist() == tokens[1:] + [IGNORE_INDEX] * (8 - n)


@pytest.mark.parametrize("block_size", [4, 8, 1000])
@pytest.mark.parametrize("count", [1, 4, 100])
def test_whole_documents_are_predicted_from_their_first_token(block_size, count):
    held_out = split()
    windows = evaluation_windows(held_out, block_size, 8, count)
    spans = held_out.documents
    chosen = {window.document for window in windows}
    assert len(chosen) == min(count, len(LENGTHS))
    predicted = [p for w in windows for p in range(w.offset + 1, w.offset + w.length)]
    assert sorted(predicted) == sorted(
        p
        for name in chosen
        for p in range(spans[name].offset, spans[name].offset + spans[name].length)
    )
    assert max(window.length for window in windows) <= block_size + 1
    # The budget does not count.
    assert windows == evaluation_windows(held_out, block_size, 10**6, count)


def test_the_documents_are_the_same_for_every_tokenizer():
    """Their lengths in tokens and their order differ, and the windows with them."""
    for count in range(1, len(LENGTHS)):
        names = [
            {s.documents[w.document].id for w in evaluation_windows(s, 8, 8, count)}
            for s in (split(), reversed_split(2))
        ]
        assert names[0] == names[1]


def test_an_end_of_text_stands_before_the_first_document(tmp_path):
    path = tmp_path / "val.bin"
    np.array([5, 6, 7, 256], dtype="<u2").tofile(path)
    tokens = TokenSplit("val", [path], None)
    assert tokens.window(-1, 3).tolist() == [256, 5, 6]
    assert tokens.window(-1, 5).tolist() == [256, 5, 6, 7, 256]
