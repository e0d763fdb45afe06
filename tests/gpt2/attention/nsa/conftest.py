"""Branches by themselves, and short chunks."""

import pytest

from gpt2.attention.nsa import compressed, module


@pytest.fixture
def thin_rows(monkeypatch, thin_chunks):
    """Chunks of eight rows in every branch."""
    monkeypatch.setattr(compressed, "CHUNK_ELEMENTS", 0)
    monkeypatch.setattr(compressed, "FEWEST_ROWS", 8)


@pytest.fixture
def branch(monkeypatch):
    """Makes one branch stand alone: gates of 1 and 0."""

    def only(number):
        def gated(branches, gates):
            return branches[number]

        monkeypatch.setattr(module, "combine", gated)

    return only
