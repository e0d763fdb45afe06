"""Fixtures: every backend of the selected branch, and small chunks."""

from functools import partial

import pytest

from gpt2.attention.nsa import by_blocks, by_rows, gather, module
from tests.gpt2.attention.nsa.sizes import BACKENDS, options


@pytest.fixture(params=BACKENDS)
def nsa(request, monkeypatch):
    """Return ``options`` for each backend; a call of the other backend fails."""
    other = "attend_gathered" if request.param == "blocks" else "attend_selected"

    def refuse(*given):
        raise AssertionError(f"{other} in place of {request.param}")

    monkeypatch.setattr(module, other, refuse)
    return partial(options, **BACKENDS[request.param])


@pytest.fixture
def thin_rows(monkeypatch):
    """Use chunks of eight rows in every branch, and a few rows in the selected branch's kernels."""
    monkeypatch.setattr(by_rows, "CHUNK_ELEMENTS", 0)
    monkeypatch.setattr(by_rows, "FEWEST_ROWS", 8)
    monkeypatch.setattr(by_blocks, "BAND", 16)
    monkeypatch.setattr(by_blocks, "ROWS", 5)
    monkeypatch.setattr(gather, "CHUNK_NUMBERS", 500)
