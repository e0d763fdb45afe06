"""torch's settings are the process's own: each test leaves them as it found them."""

import pytest


@pytest.fixture(autouse=True)
def _as_before(torch_as_before: None) -> None:
    pass
