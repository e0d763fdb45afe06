"""The split of a data set: which side each text is on, and the proof that no text is on both.

Whole documents are held out, by a hash of their text. A source with fewer than ten documents, or whose
documents would leave a side without text, is split by pieces instead: see ``pieces``. A document is
identified by its text; in a token file, a document is the tokens between two end-of-text tokens.
"""

import hashlib
import itertools
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.data.corpus import Corpus, CustomCorpus
from gpt2.data.packages import Document, PackagedCorpus
from gpt2.data.shards import SplitWriter, digest_of_digests
from lib.console import log
from lib.errors import DataError, Problem

_FEW_DOCUMENTS = 10
# About four thousand GPT-2 tokens.
_HELD_OUT_CHARACTERS = 1 << 14
# 128 bits: two of 10^12 texts collide by chance once in 10^15 data sets.
_FOLDED_BYTES = 16
# Pairs listed by name; further pairs are only counted.
_MAX_NAMED_PAIRS = 10


def is_held_out(text: str, val_fraction: float) -> bool:
    """Return the side of a document, which depends on its text only.

    Adding a document moves no other document, and identical texts are always on the same side.
    """
    head = hashlib.sha256(text.encode()).digest()[:8]
    return int.from_bytes(head, "big") / 2**64 < val_fraction


def is_by_pieces(corpus: Corpus, val_fraction: float) -> bool:
    """Return whether the documents of your own text are too few to hold out whole ones."""
    if not isinstance(corpus, CustomCorpus) or corpus.explicit_split:
        return False
    if corpus.format == "text" and len(corpus.files) < _FEW_DOCUMENTS:
        # Without reading a file that may be long.
        return True
    sides = set()
    for number, document in enumerate(corpus.documents(), start=1):
        if document.text:
            sides.add(is_held_out(document.text, val_fraction))
        if number >= _FEW_DOCUMENTS and len(sides) == 2:
            return False
    return True


def split_documents(
    corpus: PackagedCorpus | CustomCorpus, val_fraction: float, by_pieces: bool, downloads: Path
) -> Iterator[tuple[str, Document]]:
    """Yield the side, train or val, of each document or piece, in the order of the source."""
    for document in corpus.documents(downloads):
        if by_pieces:
            yield from pieces(document, val_fraction)
            continue
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
    if not text:
        return
    sections = max(1, int(len(text) * val_fraction) // _HELD_OUT_CHARACTERS)
    length = len(text) / sections
    slack = int(length * val_fraction / 2)
    cuts = [0]
    for section in range(sections):
        cuts.append(_cut(text, max(1, int(length * (section + 1 - val_fraction))), slack))
        cuts.append(_cut(text, int(length * (section + 1)), slack))
    cuts[-1] = len(text)
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        if start < end:
            side = "val" if number % 2 else "train"
            yield side, Document(f"{document.id}#{number + 1}", text[start:end])


def _cut(text: str, near: int, slack: int) -> int:
    for mark in ("\n", " "):
        place = text.rfind(mark, near - slack, near)
        if place >= 0:
            return place + 1
    return near


def split_rule(corpus: Corpus, val_fraction: float, by_pieces: bool) -> dict[str, Any]:
    """Return the manifest's rule of the split."""
    if isinstance(corpus, CustomCorpus) and corpus.format == "bin":
        return {"rule": "as given: train.bin and val.bin"}
    if isinstance(corpus, CustomCorpus) and corpus.explicit_split:
        return {"rule": "as given: CUSTOM_PATH and CUSTOM_VAL_PATH"}
    rule = "held out if the first 64 bits of SHA-256(text) / 2^64 < val_fraction"
    if by_pieces:
        rule = "too few documents: the last val_fraction of each section of a document is held out"
    return {"rule": rule, "val_fraction": val_fraction}


def folded_digest(text: str) -> bytes:
    """Return a digest of ``text`` [16 bytes] that ignores case, whitespace and Unicode forms."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.sha256(folded.encode()).digest()[:_FOLDED_BYTES]


def without_invisible(text: str) -> str:
    """Return ``text`` without format characters, such as soft hyphens and zero-width spaces."""
    if text.isascii():
        return text
    return "".join(c for c in text if unicodedata.category(c) != "Cf")


class DocumentSplitter:
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


def prove_split(train: SplitWriter, val: SplitWriter, unit: str, is_own: bool) -> dict[str, Any]:
    """Check two closed splits for shared documents and return the manifest's ``split.proof``.

    Documents that differ only in case, whitespace and Unicode forms, or, ``is_own``, in invisible
    characters, are listed and logged; they are not an error. Token files contain no text, so near duplicates cannot be checked
    there; that is logged too. Raises DataError if the splits share a document.
    """
    if shared := _shared_positions(train.digests, val.digests):
        raise DataError(*_overlap_problems(train, val, shared))
    if not train.folded.size:
        log("WARN", "token files contain no text: near duplicates were not checked")
    digests = {side.name: digest_of_digests(np.unique(side.digests)) for side in (train, val)}
    return {
        "unit": unit,
        "documents": {side.name: side.digests.size for side in (train, val)},
        "overlap": 0,
        "near_duplicates": _near_duplicates(train, val, is_own) if train.folded.size else None,
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


def _near_duplicates(train: SplitWriter, val: SplitWriter, is_own: bool) -> dict[str, Any]:
    pairs = _shared_positions(train.folded, val.folded)
    names = _pair_names(train, val, pairs)
    if names:
        example = f"{names[0]['train']} and {names[0]['val']}"
        log(
            "WARN",
            f"{len(pairs)} near-duplicate document(s) across the splits (equal except for case and "
            f"whitespace), for example {example}: see split.proof in the data set's manifest",
        )
    return {
        "rule": "equal in NFKC, case folded, blanks as one"
        + (", none invisible" if is_own else ""),
        "count": len(pairs),
        "pairs": names,
    }
