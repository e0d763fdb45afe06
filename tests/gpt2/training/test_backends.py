"""Runs of one configuration with different attention backends."""

import pytest

from lib.config.field import SymbolValue

PARTS: dict[str, SymbolValue] = {
    "DROPOUT": "0.0",
    "RECIPROCAL": True,
    "RECIPROCAL_WINDOW": 5,
    "RECIPROCAL_LEARNABLE": True,
    "RA_CROSS_TOKEN": True,
    "RA_CROSS_TOKEN_MODE_ENTROPY": True,
    "RA_CROSS_TOKEN_APPLY_WEIGHTS": True,
    "ATTENTION_PATTERN_SLIDING": True,
    "SLIDING_WINDOW": 9,
    "MAX_ITERS": 2,
}


@pytest.mark.slow
def test_backends_train_equally_and_are_named(configure, train):
    losses, hashes = [], set()
    for backend in ("ROWS", "MATH"):
        config = configure(**PARTS, **{f"ATTENTION_BACKEND_{backend}": True})
        done = train(config, backend)
        asked = {"backend_requested": backend.lower(), "kernel": "by rows"}
        assert done.manifest()["attention"] == asked and "attention by rows |" in done.lines()
        losses.append([row["loss"] for row in done.rows("train")])
        hashes.add(config.hash8)
    rows, math = losses
    assert rows == math and len(hashes) == 2
