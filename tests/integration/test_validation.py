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
