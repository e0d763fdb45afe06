"""The proof that no text is on both sides of a split.

A document is identified by its text; in a token file, by the tokens between two ends of text.
"""

import hashlib
from typing import Any

import numpy as np

from gpt2.data.shards import SplitWriter, digest_of_digests
from lib.console import log
from lib.errors import DataError, Problem

# Pairs listed by name; further pairs are only counted.
_MAX_NAMED_PAIRS = 10


def prove_split(train: SplitWriter, val: SplitWriter, unit: str, is_own: bool) -> dict[str, Any]:
    """Check two closed splits for shared documents and return the manifest's ``split.proof``.

    Documents that differ only in case, whitespace and Unicode forms, or, ``is_own``, in invisible
    characters, are listed and logged; token files contain no text to compare. Raises DataError if the
    splits share a document.
    """
    shared, pairs = _shared(train, val, train.digests, val.digests)
    if shared:
        what = "training document {train} is identical to held-out document {val}"
        total = f"{shared} document(s) in both the training and the held-out split"
        remedy = "remove each shared document from one split, and type: make data"
        lines = [(what.format_map(pair), "") for pair in pairs] + [(total, remedy)]
        raise DataError(*(Problem(w, next=r, code="data.split-overlap") for w, r in lines))
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
    pairs = sorted(zip(first.tolist(), second.tolist(), strict=True))[:_MAX_NAMED_PAIRS]
    names = zip(train.names([a for a, _ in pairs]), val.names([b for _, b in pairs]), strict=True)
    return first.size, [{"train": a, "val": b} for a, b in names]
