"""Fixtures: every backend of the selected branch, and small chunks."""

from functools import partial

import pytest

from gpt2.nsa import block_major, branches, gather, query_major, select
from tests.gpt2.attention.conftest import build, gate, one_thread, thin_chunks
from tests.gpt2.nsa.sizes import BACKENDS, options

# Fixtures that are those of attention.
__all__ = ["build", "gate", "one_thread", "thin_chunks"]


@pytest.fixture(params=BACKENDS)
def nsa(request, monkeypatch):
    """Return ``options`` for each backend; a call of the other backend fails."""
    other = "attend_gathered" if request.param == "blocks" else "attend_selected"

    def refuse(*given):
        raise AssertionError(f"{other} in place of {request.param}")

    monkeypatch.setattr(branches, other, refuse)
    return partial(options, **BACKENDS[request.param])


@pytest.fixture
def thin_rows(monkeypatch):
    """Use chunks of eight rows in every branch, and a few rows in the selected branch's kernels."""
    monkeypatch.setattr(query_major, "CHUNK_ELEMENTS", 0)
    monkeypatch.setattr(query_major, "MIN_CHUNK_ROWS", 8)
    monkeypatch.setattr(block_major, "QUERIES_PER_TILE", 16)
    monkeypatch.setattr(block_major, "QUERIES_PER_VISIT", 5)
    monkeypatch.setattr(gather, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr(select, "CHUNK_ELEMENTS", 100)
