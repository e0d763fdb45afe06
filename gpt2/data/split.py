"""The side of the split that each text is on, and the digests that identify a text."""

import hashlib
import itertools
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

# About four thousand GPT-2 tokens.
_HELD_OUT_CHARACTERS = 1 << 14


@dataclass(frozen=True)
class Document:
    """A text, the unit of the split."""

    id: str
    text: str
    # Side defined by the source; None if the split is made here.
    held_out: bool | None = None


def text_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def folded_digest(text: str) -> bytes:
    """Return a digest of ``text`` [16 bytes] that ignores case, whitespace and Unicode forms.

    128 bits: two of 10^12 texts collide by chance once in 10^15 data sets.
    """
    return text_digest(" ".join(unicodedata.normalize("NFKC", text).casefold().split()))[:16]


def without_invisible(text: str) -> str:
    """Return ``text`` without format characters, such as soft hyphens and zero-width spaces."""
    if text.isascii():
        return text
    return "".join(c for c in text if unicodedata.category(c) != "Cf")


def is_held_out(text: str, val_fraction: float) -> bool:
    """Return the side of a document: adding another moves none, and equal texts are on one side."""
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
