"""That no document is trained on and held out as well, and which of them nearly are.

A document is its text; of a token file, what stands between two end-of-text tokens.
"""

import hashlib
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np

from gpt2.data.shards import SplitWriter, digest_of_digests
from lib.console import say
from lib.errors import DataError, Problem

# 128 bits: two of 10^12 texts meet by chance once in 10^15 data sets.
_FOLDED_BYTES = 16
# Pairs that are named, of however many there are.
_NAMED = 10


def folded_digest(text: str) -> bytes:
    """A digest [16] that stays the same when only case, blanks or forms of a character change."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.sha256(folded.encode()).digest()[:_FOLDED_BYTES]


class Pieces:
    """Finds the documents of a token file, which comes in chunks; ``note`` gets their SHA-256."""

    def __init__(self, end_of_text: int, note: Callable[[bytes], None]) -> None:
        self._end_of_text = end_of_text
        self._note = note
        self._open: list[np.ndarray] = []

    def add(self, tokens: np.ndarray) -> None:
        """Go on with ``tokens`` [T] (uint16)."""
        ends = np.flatnonzero(tokens == self._end_of_text)
        *whole, rest = np.split(tokens, ends + 1)
        for piece in whole:
            self._open.append(piece[:-1])
            self.end()
        self._open.append(rest)

    def end(self) -> None:
        """A document ends here; an empty one is none."""
        content = b"".join(piece.astype("<u2").tobytes() for piece in self._open)
        self._open.clear()
        if content:
            self._note(hashlib.sha256(content).digest())


def prove(train: SplitWriter, val: SplitWriter) -> dict[str, Any]:
    """What the manifest says of the two closed sides. DataError where they share a document.

    Documents that are equal but for case and blanks are listed and said, and are no error. A token
    file holds no text, so nothing is known of those, which is said too.
    """
    if shared := _common(train.digests, val.digests):
        raise DataError(*_shared(train, val, shared))
    if not train.folded.size:
        say("WARN", "token files hold no text: no copies in other case or blanks were looked for")
    digests = {side.name: digest_of_digests(np.unique(side.digests)) for side in (train, val)}
    return {
        "unit": "document",
        "documents": {side.name: side.digests.size for side in (train, val)},
        "overlap": 0,
        "near_duplicates": _near(train, val) if train.folded.size else None,
        "digest": hashlib.sha256(
            "\n".join(f"{name}:{digest}" for name, digest in digests.items()).encode()
        ).hexdigest(),
    }


def _common(train: np.ndarray, val: np.ndarray) -> list[tuple[int, int]]:
    """Where each digest that stands on both sides first stands on either, in order."""
    _, first, second = np.intersect1d(train, val, return_indices=True)
    return sorted(zip(first.tolist(), second.tolist(), strict=True))


def _named(
    train: SplitWriter, val: SplitWriter, pairs: list[tuple[int, int]]
) -> list[dict[str, str]]:
    """What the first of the pairs are called."""
    if not pairs:
        return []
    first, second = zip(*pairs[:_NAMED], strict=True)
    names = zip(train.names(first), val.names(second), strict=True)
    return [{"train": one, "val": other} for one, other in names]


def _shared(train: SplitWriter, val: SplitWriter, pairs: list[tuple[int, int]]) -> list[Problem]:
    remedy = "take it out of one side, and type: make data"
    problems = [
        Problem(f"{pair['train']} of the training side is {pair['val']} of the held-out side")
        for pair in _named(train, val, pairs)
    ]
    many = f"{len(pairs)} document(s) stand on both sides of the split"
    return [*problems, Problem(many, next=remedy)]


def _near(train: SplitWriter, val: SplitWriter) -> dict[str, Any]:
    pairs = _common(train.folded, val.folded)
    named = _named(train, val, pairs)
    if named:
        example = f"{named[0]['train']} and {named[0]['val']}"
        say(
            "WARN",
            f"{len(pairs)} document(s) stand on both sides but for case and blanks, such as "
            f"{example}: split.proof of the data set's manifest lists them",
        )
    return {
        "rule": "equal in NFKC, case folded, blanks as one",
        "count": len(pairs),
        "pairs": named,
    }
