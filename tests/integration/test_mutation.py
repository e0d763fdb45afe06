"""The make mutation-test command: planted faults, verdicts, record, and an unchanged tree."""

import json
import subprocess

import pytest

from lib.project import ROOT

SCRIPT = "mutation-test"


@pytest.mark.long
def test_faults_are_planted_and_the_tree_is_unchanged(build):
    folder = build()
    status = ["git", "-C", str(ROOT), "status", "--porcelain"]
    before = subprocess.run(status, capture_output=True, check=True).stdout
    # Rotation of positions, which one configuration has.
    words = ("--count", "3", "--area", "gpt2/attention/positions.py")
    code, table, stderr = folder.command(SCRIPT, *words)
    record = json.loads((folder.path / "mutation-test.json").read_text())
    assert code == (0 if record["kill_rate"] >= record["goal"] else 1), stderr
    assert "kill rate" in table and "61/61 trials without a fault" in stderr
    assert len(record["faults"]) == 3
    assert {f["state"] for f in record["faults"]} <= {"caught", "equivalent", "survived"}
    assert subprocess.run(status, capture_output=True, check=True).stdout == before
