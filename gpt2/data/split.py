"""The split of a data set: which side each text is on, and the proof that no text is on both.

A document is identified by its text; in a token file, by the tokens between two ends of text.
"""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpt2.data.document import Document, text_digest
from gpt2.data.shards import SplitWriter, digest_of_digests
from lib.console import log
from lib.errors import DataError, Problem

# About four thousand GPT-2 tokens.
_HELD_OUT_CHARACTERS = 1 << 14
# Pairs listed by name; further pairs are only counted.
_MAX_NAMED_PAIRS = 10


def is_held_out(text: str, val_fraction: float) -> bool:
    """Return the side of a document, which depends on its text only.

    Adding a document moves no other document, and identical texts are always on the same side.
    """
    return int.from_bytes(text_digest(text)[:8], "big") / 2**64 < val_fraction


def split_document(
    document: Document, val_fraction: float, by_pieces: bool
) -> Iterator[tuple[str, Document]]:
    """Yield the side, train or val, of a document, or of each of its pieces."""
    if by_pieces:
        yield from pieces(document, val_fraction)
        return
    held_out = document.held_out
    if held_out is None:
        held_out = is_held_out(document.text, val_fraction)
    yield "val" if held_out else "train", document


def pieces(document: Document, val_fraction: float) -> Iterator[tuple[str, Document]]:
    """Yield the pieces of a document, which are training and held-out text in turn.

    The document is cut into sections of equal length, as many as have 16,384 held-out characters each,
    and the last ``val_fraction`` of each section is held out. A cut moves back to the end of a line, or
    else of a word, by at most half of a held-out piece.
    """
    text = document.text
    sections = max(1, int(len(text) * val_fraction) // _HELD_OUT_CHARACTERS)
    length = len(text) / sections
    slack = int(length * val_fraction / 2)
    cuts = [0]
    for section in range(sections):
        cuts.append(_cut(text, max(1, int(length * (section + 1 - val_fraction))), slack))
        cuts.append(_cut(text, int(length * (section + 1)), slack))
    cuts[-1] = len(text)
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        if piece := text[start:end]:
            side = "val" if number % 2 else "train"
            yield side, Document(f"{document.id}#{number + 1}", piece)


def _cut(text: str, near: int, slack: int) -> int:
    for mark in ("\n", " "):
        place = text.rfind(mark, near - slack, near)
        if place >= 0:
            return place + 1
    return near


def prove_split(train: SplitWriter, val: SplitWriter, unit: str, is_own: bool) -> dict[str, Any]:
    """Check two closed splits for shared documents and return the manifest's ``split.proof``.

    Documents that differ only in case, whitespace and Unicode forms, or, ``is_own``, in invisible
    characters, are listed and logged. Token files contain no text, so near duplicates cannot be checked
    there; that is logged too. Raises DataError if the splits share a document.
    """
    shared, pairs = _shared(train, val, train.digests, val.digests)
    if shared:
        code = "data.split-overlap"
        what = "training document {train} is identical to held-out document {val}"
        total = f"{shared} document(s) in both the training and the held-out split"
        remedy = "remove each shared document from one split, and type: make data"
        named = [Problem(what.format_map(pair), code=code) for pair in pairs]
        raise DataError(*named, Problem(total, next=remedy, code=code))
    near = None
    if train.folded.size:
        count, pairs = _shared(train, val, train.folded, val.folded)
        rule = "equal in NFKC, case folded, blanks as one" + (", none invisible" if is_own else "")
        near = {"rule": rule, "count": count, "pairs": pairs}
        if pairs:
            example = f"{pairs[0]['train']} and {pairs[0]['val']}"
            log(
                "WARN",
                f"{count} near-duplicate document(s) across the splits (equal except for case and "
                f"whitespace), for example {example}: see split.proof in the data set's manifest",
            )
    else:
        log("WARN", "token files contain no text: near duplicates were not checked")
    digests = [f"{s.name}:{digest_of_digests(np.unique(s.digests))}" for s in (train, val)]
    return {
        "unit": unit,
        "documents": {side.name: side.digests.size for side in (train, val)},
        "overlap": 0,
        "near_duplicates": near,
        "digest": hashlib.sha256("\n".join(digests).encode()).hexdigest(),
    }


def _shared(
    train: SplitWriter, val: SplitWriter, left: np.ndarray, right: np.ndarray
) -> tuple[int, list[dict[str, str]]]:
    """Return the number of digests in both ``left`` and ``right``, and the first pairs of names."""
    _, first, second = np.intersect1d(left, right, return_indices=True)
    pairs = sorted(zip(first.tolist(), second.tolist(), strict=True))
    named = pairs[:_MAX_NAMED_PAIRS]
    names = zip(train.names([a for a, _ in named]), val.names([b for _, b in named]), strict=True)
    return len(pairs), [{"train": a, "val": b} for a, b in names]
