"""The proof of this machine, from the command line."""

import json
import subprocess
import sys

import pytest

from lib.project import ROOT


def test_the_machine_s_proof_as_json() -> None:
    command = [sys.executable, str(ROOT / "scripts/validate_machine.py"), "--json"]
    done = subprocess.run(command + ["--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert {row["state"] for row in document["rows"]} == {"PASS"}
    assert done.stderr.startswith("CHECK   ")


def test_the_needle_s_table_and_progress(build) -> None:
    code, table, said = build().command("scripts/needle.py", "--arms", "window only", STEPS="1")
    assert code == 0, said
    assert "| window only | " in table and "chance, 12.5" in table
    assert "NEEDLE  window only: step 1 of 1, loss 2." in said
    assert said.endswith(" % found, 12.5 % by luck\n")


@pytest.mark.parametrize(
    "variable, value, problem",
    [
        ("STEPS", "0", "there is nothing to learn in 0 steps"),
        ("SEED", "few", "'few' is not a whole number"),
    ],
)
def test_what_the_needle_refuses(build, variable, value, problem) -> None:
    code, table, said = build().command("scripts/needle.py", **{variable: value})
    assert (code, table) == (2, "")
    assert said == f"ERROR   {variable}: {problem}\nEXIT    code 2\n"
