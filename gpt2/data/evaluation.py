"""The fixed, deterministic list of windows that every evaluation reads."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpt2.data.store import DocumentSpan, Split
from lib.errors import ConfigError, Problem

# Target of padded positions; torch's cross-entropy ignores it.
IGNORED = -100


@dataclass(frozen=True)
class EvalWindow:
    """Window of ``length`` tokens at ``offset`` of a split; all but the first are predicted."""

    # Id of the document, or window-000123 if document boundaries are unknown.
    document: str
    offset: int
    length: int

    @property
    def predicted(self) -> int:
        """Return the number of predicted tokens."""
        return self.length - 1


def evaluation_windows(split: Split, block_size: int, budget_tokens: int) -> list[EvalWindow]:
    """Return the windows of an evaluation of at most ``budget_tokens`` predicted tokens.

    Every document is cut into windows of ``block_size + 1`` tokens that overlap by one token, so
    each token except a document's first is predicted once, and no context crosses a document
    boundary. Windows are sorted by SHA-256(document digest, window number), which mixes documents,
    and selected from the front until the budget is used: a larger budget only adds windows.
    Raises ConfigError if the budget is smaller than the first window.
    """
    if split.documents is None:
        windows = _unit_windows(split, block_size)
    else:
        cut = [(d, w) for d in split.documents for w in _cut(d, block_size)]
        windows = [w for _, w in sorted(cut, key=lambda pair: _order(*pair))]
    chosen = []
    for window in windows:
        budget_tokens -= window.predicted
        if budget_tokens < 0:
            break
        chosen.append(window)
    if not chosen:
        raise ConfigError(
            Problem(
                f"smaller than one evaluation window of {block_size} predicted tokens",
                "EVAL_TOKENS",
                "type: make menuconfig, and set EVAL_TOKENS to at least BLOCK_SIZE",
                code="config.out-of-range",
            )
        )
    return chosen


def eval_batches(
    split: Split, windows: Sequence[EvalWindow], block_size: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, list[str]]]:
    """Yield inputs x [B, T], targets y [B, T] (int64) and the document id of each row.

    T is ``block_size``; a short window is padded with x = 0 and y = ``IGNORED``. The last batch may
    have fewer rows.
    """
    for start in range(0, len(windows), batch_size):
        rows = windows[start : start + batch_size]
        x_BT = np.zeros((len(rows), block_size), dtype=np.int64)
        y_BT = np.full((len(rows), block_size), IGNORED, dtype=np.int64)
        for i, row in enumerate(rows):
            tokens = split.window(row.offset, row.length)
            x_BT[i, : row.predicted] = tokens[:-1]
            y_BT[i, : row.predicted] = tokens[1:]
        yield x_BT, y_BT, [row.document for row in rows]


def _cut(document: DocumentSpan, block_size: int) -> list[EvalWindow]:
    end = document.offset + document.length
    starts = range(document.offset, end - 1, block_size)
    return [EvalWindow(document.id, s, min(block_size + 1, end - s)) for s in starts]


def _order(document: DocumentSpan, window: EvalWindow) -> tuple[bytes, int]:
    """Return the sort key of a window; identical documents are ordered by their position."""
    within = window.offset - document.offset
    return hashlib.sha256(f"{document.digest}:{within}".encode()).digest(), window.offset


def _unit_windows(split: Split, block_size: int) -> list[EvalWindow]:
    """Cut a split with unknown document boundaries as one document; each window is a unit."""
    whole = DocumentSpan("", 0, split.n_tokens, split.name)
    windows = sorted(_cut(whole, block_size), key=lambda w: _order(whole, w))
    return [EvalWindow(f"window-{w.offset // block_size:06d}", w.offset, w.length) for w in windows]
