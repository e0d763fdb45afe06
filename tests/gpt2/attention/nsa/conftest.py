"""Branches by themselves, and short chunks."""

import pytest

from gpt2.attention.nsa import by_blocks, by_rows, module


@pytest.fixture
def thin_rows(monkeypatch):
    """Chunks of eight rows in every branch."""
    monkeypatch.setattr(by_rows, "CHUNK_ELEMENTS", 0)
    monkeypatch.setattr(by_rows, "FEWEST_ROWS", 8)
    monkeypatch.setattr(by_blocks, "ROWS", 5)


@pytest.fixture
def branch(monkeypatch):
    """Makes one branch stand alone: gates of 1 and 0."""

    def only(number):
        def gated(branches, gates):
            return branches[number]

        monkeypatch.setattr(module, "combine", gated)

    return only
