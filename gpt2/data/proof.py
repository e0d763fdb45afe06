"""Proof that the training and held-out splits share no document, with a list of near duplicates.

A document is identified by its text; in a token file, a document is the tokens between two
end-of-text tokens.
"""

import hashlib
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np

from gpt2.data.shards import SplitWriter, digest_of_digests
from lib.console import say
from lib.errors import DataError, Problem

# 128 bits: two of 10^12 texts collide by chance once in 10^15 data sets.
_FOLDED_BYTES = 16
# Pairs listed by name; further pairs are only counted.
_MAX_NAMED_PAIRS = 10


def folded_digest(text: str) -> bytes:
    """Return a digest of ``text`` [16 bytes] that ignores case, whitespace and Unicode forms."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.sha256(folded.encode()).digest()[:_FOLDED_BYTES]


class Pieces:
    """Splitter of a token file into documents; ``note`` receives the SHA-256 of each document."""

    def __init__(self, end_of_text: int, note: Callable[[bytes], None]) -> None:
        self._end_of_text = end_of_text
        self._note = note
        self._open: list[np.ndarray] = []

    def add(self, tokens: np.ndarray) -> None:
        """Process the next chunk ``tokens`` [T] (uint16)."""
        ends = np.flatnonzero(tokens == self._end_of_text)
        *complete, rest = np.split(tokens, ends + 1)
        for piece in complete:
            self._open.append(piece[:-1])
            self.end()
        self._open.append(rest)

    def end(self) -> None:
        """End the current document; an empty document is skipped."""
        content = b"".join(piece.astype("<u2").tobytes() for piece in self._open)
        self._open.clear()
        if content:
            self._note(hashlib.sha256(content).digest())


def prove(train: SplitWriter, val: SplitWriter) -> dict[str, Any]:
    """Check two closed splits for shared documents and return the manifest's ``split.proof``.

    Documents that differ only in case and whitespace are listed and logged; they are not an error.
    Token files contain no text, so near duplicates cannot be checked there; that is logged too.
    Raises DataError if the splits share a document.
    """
    if shared := _shared_positions(train.digests, val.digests):
        raise DataError(*_overlap_problems(train, val, shared))
    if not train.folded.size:
        say("WARN", "token files contain no text: near duplicates were not checked")
    digests = {side.name: digest_of_digests(np.unique(side.digests)) for side in (train, val)}
    return {
        "unit": "document",
        "documents": {side.name: side.digests.size for side in (train, val)},
        "overlap": 0,
        "near_duplicates": _near_duplicates(train, val) if train.folded.size else None,
        "digest": hashlib.sha256(
            "\n".join(f"{name}:{digest}" for name, digest in digests.items()).encode()
        ).hexdigest(),
    }


def _shared_positions(train: np.ndarray, val: np.ndarray) -> list[tuple[int, int]]:
    """Return the first position in ``train`` and in ``val`` of each shared digest, in order."""
    _, first, second = np.intersect1d(train, val, return_indices=True)
    return sorted(zip(first.tolist(), second.tolist(), strict=True))


def _pair_names(
    train: SplitWriter, val: SplitWriter, pairs: list[tuple[int, int]]
) -> list[dict[str, str]]:
    """Return the document names of the first pairs."""
    if not pairs:
        return []
    train_positions, val_positions = zip(*pairs[:_MAX_NAMED_PAIRS], strict=True)
    names = zip(train.names(train_positions), val.names(val_positions), strict=True)
    return [{"train": train_name, "val": val_name} for train_name, val_name in names]


def _overlap_problems(
    train: SplitWriter, val: SplitWriter, pairs: list[tuple[int, int]]
) -> list[Problem]:
    remedy = "remove each shared document from one split, and type: make data"
    problems = [
        Problem(
            f"training document {pair['train']} is identical to held-out document {pair['val']}",
            code="data.split-overlap",
        )
        for pair in _pair_names(train, val, pairs)
    ]
    total = f"{len(pairs)} document(s) in both the training and the held-out split"
    return [*problems, Problem(total, next=remedy, code="data.split-overlap")]


def _near_duplicates(train: SplitWriter, val: SplitWriter) -> dict[str, Any]:
    pairs = _shared_positions(train.folded, val.folded)
    names = _pair_names(train, val, pairs)
    if names:
        example = f"{names[0]['train']} and {names[0]['val']}"
        say(
            "WARN",
            f"{len(pairs)} near-duplicate document(s) across the splits (equal except for case and "
            f"whitespace), for example {example}: see split.proof in the data set's manifest",
        )
    return {
        "rule": "equal in NFKC, case folded, blanks as one",
        "count": len(pairs),
        "pairs": names,
    }
