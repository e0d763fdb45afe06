"""Evaluation windows: each held-out token once, no window across documents, no randomness."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpt2.data.dataset import DocumentSpan, TokenSplit
from gpt2.data.evaluation_windows import IGNORE_INDEX, evaluation_batches, evaluation_windows
from tests.errors import error_of

LENGTHS = [1, 2, 8, 9, 10, 17, 100, 3, 1, 41]


def split(lengths=tuple(LENGTHS), documents=True, reverse=False, factor=1):
    """Return a split of consecutive documents, whose tokens are their positions."""
    numbered = list(enumerate(lengths))
    spans, start = [], 0
    for i, n in reversed(numbered) if reverse else numbered:
        spans.append(DocumentSpan(f"d{i}", start, factor * n, f"digest of {i}"))
        start += factor * n

    def window(offset, length):
        assert offset >= 0 and offset + length <= start
        return np.arange(offset, offset + length, dtype=np.uint16)

    documents = spans if documents else None
    return SimpleNamespace(name="val", n_tokens=start, documents=documents, window=window)


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=9).filter(lambda n: max(n) > 1)


@given(lengths, st.integers(1, 20), st.integers(20, 300))
def test_a_prefix_predicts_each_token_except_a_documents_first_once(lengths, block_size, budget):
    held_out = split(lengths)
    everything = evaluation_windows(held_out, block_size, 10**6)
    predicted = Counter()
    for window in everything:
        document = held_out.documents[window.document]
        assert 2 <= window.length <= block_size + 1 and document.offset <= window.offset
        assert window.offset + window.length <= document.offset + document.length
        predicted.update(range(window.offset + 1, window.offset + window.length))
    firsts = {d.offset for d in held_out.documents}
    assert predicted == Counter(p for p in range(held_out.n_tokens) if p not in firsts)
    windows = evaluation_windows(held_out, block_size, budget)
    assert windows == everything[: len(windows)]
    assert sum(w.predicted for w in windows) <= budget
    more = everything[: len(windows) + 1]
    assert windows == everything or sum(w.predicted for w in more) > budget


@given(lengths, st.integers(1, 20), st.integers(1, 12))
def test_whole_documents_are_predicted_from_their_first_token(lengths, block_size, count):
    held_out = split(lengths)
    windows = evaluation_windows(held_out, block_size, 1, count)
    chosen = {window.document for window in windows}
    assert len(chosen) == min(count, len(lengths))
    predicted = [p for w in windows for p in range(w.offset + 1, w.offset + w.length)]
    spans = [held_out.documents[number] for number in chosen]
    assert sorted(predicted) == sorted(
        p for span in spans for p in range(span.offset, span.offset + span.length)
    )
    assert max(window.length for window in windows) <= block_size + 1


def test_order_follows_the_text_and_mixes_documents():
    def order(held_out):
        windows = evaluation_windows(held_out, 8, 10**6)
        return [(held_out.documents[w.document].id, w.length) for w in windows]

    assert order(split(reverse=True)) == order(split())
    offsets = [w.offset for w in evaluation_windows(split(), 8, 10**6)]
    assert offsets != sorted(offsets)


def test_the_documents_are_the_same_for_every_tokenizer():
    """Their lengths in tokens and their order differ, and the windows with them."""
    other = split(reverse=True, factor=2)
    for count in range(1, len(LENGTHS)):
        names, others = (
            {s.documents[w.document].id for w in evaluation_windows(s, 8, 8, count)}
            for s in (split(), other)
        )
        assert names == others


def test_each_window_is_a_unit_without_documents_and_the_budget_has_one():
    windows = evaluation_windows(split(documents=False), 8, 10**6)
    n_tokens = sum(LENGTHS)
    assert len({w.document for w in windows}) == len(windows) == -(-(n_tokens - 1) // 8)
    assert {w.document for w in windows if w.offset == 24} == {3}
    assert sum(w.predicted for w in windows) == n_tokens - 1
    (problem,) = error_of(evaluation_windows, split(documents=False), 8, 7).problems
    assert (problem.code, problem.where) == ("config.out-of-range", "EVAL_TOKENS")
    assert "BLOCK_SIZE" in problem.next


def test_batches():
    windows = evaluation_windows(split(), 8, 10**6)
    rows = []
    for x_BT, y_BT in evaluation_batches(split(), windows, 8, 5):
        assert x_BT.shape == y_BT.shape == (len(x_BT), 8) and len(x_BT) <= 5
        assert x_BT.dtype == y_BT.dtype == np.int64
        rows += zip(x_BT, y_BT, strict=True)
    for (x_T, y_T), window in zip(rows, windows, strict=True):
        tokens = list(range(window.offset, window.offset + window.length))
        padding = 9 - window.length
        assert x_T.tolist() == tokens[:-1] + [0] * padding
        assert y_T.tolist() == tokens[1:] + [IGNORE_INDEX] * padding


def test_an_end_of_text_stands_before_the_first_document(tmp_path):
    path = tmp_path / "val.bin"
    np.array([5, 6, 7, 256], dtype="<u2").tofile(path)
    tokens = TokenSplit("val", [path], None)
    assert tokens.window(-1, 3).tolist() == [256, 5, 6]
    assert tokens.window(-1, 5).tolist() == [256, 5, 6, 7, 256]
