"""A document: a text, and the digests that identify it."""

import hashlib
import unicodedata
from dataclasses import dataclass


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
