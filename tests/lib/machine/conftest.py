"""Restore process-wide torch settings after each test."""

import pytest


@pytest.fixture(autouse=True)
def _as_before(torch_as_before: None) -> None:
    pass
