"""Commands that cannot write one of their files: one error, nothing torn, and the next call goes on."""

import re
from typing import Any

import pytest

from tests.fuzz.harness import temporary_folder
from tests.integration.fail_at_write import CASES

SUITE = ("checkpoint", "metrics", "read-only run", "log under make", "table", "export", "config.py")
# Files without which a run goes on.
SPARED = {"telemetry"}
CAUSE = "No space left|Read-only file system|Input/output error"


def check(name: str, outcome: dict[str, Any]) -> None:
    """Assert what every case promises."""
    first, again = outcome["first"], outcome["again"]
    assert "Traceback" not in first["stdout"] + first["stderr"], name
    assert first["code"] in ((0,) if name in SPARED else (1, 3)), (name, first)
    lines = re.findall(f"^(?:ERROR|FAIL|WARN) .*(?:{CAUSE}).*$", first["stderr"], re.MULTILINE)
    # The sampler is named, else the file or its folder.
    assert lines and all("/build/" in line or name in SPARED for line in lines), (name, first)
    assert again["code"] == 0, (name, again)
    assert outcome["torn"] == outcome["leftovers"] == [], name
    # The bytes of a command that nothing disturbed.
    assert outcome["same"], name


@pytest.mark.slow
def test_files_that_cannot_be_written(with_write_faults):
    with temporary_folder() as folder:
        outcomes = with_write_faults("fail_at_write", folder, *SUITE)
    for name, outcome in outcomes.items():
        check(name, outcome)


@pytest.mark.long
def test_more_files_that_cannot_be_written(with_write_faults):
    with temporary_folder() as folder:
        rest = [name for name in CASES if name not in SUITE]
        outcomes = with_write_faults("fail_at_write", folder, *rest)
    for name, outcome in outcomes.items():
        check(name, outcome)
