"""The proof of this machine, from the command line."""

import json
import subprocess
import sys

from lib.project import ROOT


def test_the_machine_s_proof_as_json() -> None:
    command = [sys.executable, str(ROOT / "scripts/validate_machine.py"), "--json"]
    done = subprocess.run(command + ["--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert {row["state"] for row in document["rows"]} == {"PASS"}
    assert done.stderr.startswith("CHECK   ")


def test_the_needle_s_table_and_progress() -> None:
    command = [sys.executable, str(ROOT / "scripts/needle.py"), "--arms", "window only"]
    done = subprocess.run(command + ["--steps", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| window only | " in done.stdout and "chance is 12.5" in done.stdout
    assert "NEEDLE  window only: step 1 of 1, loss 2." in done.stderr
