"""The windows of held-out text that an evaluation reads: a fixed list, equal for every run.

B rows of a batch, T tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpt2.data.dataset import DocumentSpan, TokenSplit
from lib.errors import ConfigError, Problem

# Target of padded positions; torch's cross-entropy ignores it.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class EvaluationWindow:
    """Window of ``length`` tokens at ``offset`` of a split; all but the first are predicted."""

    # Position of the document in the index of its split, or number of the window if document
    # boundaries are unknown. Names may be equal: a file of the user chooses them.
    document: int
    offset: int
    length: int

    @property
    def predicted(self) -> int:
        return self.length - 1


def evaluation_windows(
    split: TokenSplit, block_size: int, budget_tokens: int, documents: int = 0
) -> list[EvaluationWindow]:
    """Return the windows of an evaluation of at most ``budget_tokens`` predicted tokens.

    Every document is cut into windows of ``block_size + 1`` tokens that overlap by one token, so
    each token except a document's first is predicted once, and no context crosses a document
    boundary. Windows are sorted by SHA-256(document digest, window number), which mixes documents,
    and selected from the front until the budget is used: a larger budget only adds windows.

    Windows of so many ``documents``, or of all if there are fewer, have no budget. They predict each
    token: the first window begins with the end of text before its document. The documents are the
    first by SHA-256 of their digests: the same for every tokenizer.
    Raises ConfigError if the budget is smaller than the first window.
    """
    if documents:
        assert split.documents is not None, "EVAL_DOCUMENTS of a token file"
        numbered = sorted(
            enumerate(split.documents), key=lambda pair: _order(pair[1], pair[1].offset)
        )
        whole = [
            _cut(number, replace(span, offset=span.offset - 1, length=span.length + 1), block_size)
            for number, span in numbered[:documents]
        ]
        return [window for cut in whole for window in cut]
    spans = split.documents or [DocumentSpan("", 0, split.n_tokens, split.name)]
    windows = [w for number, span in enumerate(spans) for w in _cut(number, span, block_size)]
    windows.sort(key=lambda window: _order(spans[window.document], window.offset))
    if split.documents is None:
        windows = [replace(window, document=window.offset // block_size) for window in windows]
    chosen = []
    for window in windows:
        budget_tokens -= window.predicted
        if budget_tokens < 0:
            break
        chosen.append(window)
    if not chosen:
        what = f"smaller than one evaluation window of {block_size} predicted tokens"
        remedy = "type: make menuconfig, and set EVAL_TOKENS to at least BLOCK_SIZE"
        raise ConfigError(Problem(what, "EVAL_TOKENS", remedy, code="config.out-of-range"))
    return chosen


def evaluation_batches(
    split: TokenSplit, windows: Sequence[EvaluationWindow], block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs x [B, T] and targets y [B, T] (int64).

    T is ``block_size``; a short window is padded with x = 0 and y = −100. The last batch may
    have fewer rows.
    """
    for start in range(0, len(windows), batch_size):
        rows = windows[start : start + batch_size]
        x_BT = np.zeros((len(rows), block_size), dtype=np.int64)
        y_BT = np.full((len(rows), block_size), IGNORE_INDEX, dtype=np.int64)
        for i, row in enumerate(rows):
            tokens = split.window(row.offset, row.length)
            x_BT[i, : row.predicted] = tokens[:-1]
            y_BT[i, : row.predicted] = tokens[1:]
        yield x_BT, y_BT


def _cut(number: int, document: DocumentSpan, block_size: int) -> list[EvaluationWindow]:
    end = document.offset + document.length
    starts = range(document.offset, end - 1, block_size)
    return [EvaluationWindow(number, s, min(block_size + 1, end - s)) for s in starts]


def _order(document: DocumentSpan, offset: int) -> tuple[bytes, int]:
    """Return the sort key of a window; identical documents are ordered by their position."""
    within = offset - document.offset
    return hashlib.sha256(f"{document.digest}:{within}".encode()).digest(), offset
