"""Machine validation and the retrieval task, from the command line."""

import json

import pytest


def test_machine_validation_as_json(build) -> None:
    script = "validate-machine"
    code, text, said = build().command(script, "--device", "cpu", JSON="1")
    assert code == 0, said
    document = json.loads(text)
    assert document["schema_version"] == 1
    states = {(row["backend"], row["state"]) for row in document["rows"]}
    assert states == {("blocks", "PASS"), ("gather", "PASS"), ("triton", "ABSENT")}
    assert said.startswith("CHECK   ")


def test_the_needle_s_table_and_progress(build) -> None:
    code, table, said = build().command("needle-test", "--arms", "window only", ITERS="1")
    assert code == 0, said
    (row,) = [line for line in table.splitlines() if line.startswith("| window only | ")]
    far, luck, first, seconds = (float(cell) for cell in row.split("|")[2:-1])
    assert luck == 12.5 and 0 <= far <= 100 and 0 <= first <= 100 and seconds >= 0
    progress, result = said.splitlines()
    assert progress.startswith("NEEDLE  window only: ")
    assert "step 1 of 1" in progress and "loss 2." in progress
    assert result.startswith("NEEDLE  window only: ") and "12.5 %" in result


@pytest.mark.parametrize(
    "variable, value, kind",
    [("ITERS", "0", "usage.out-of-range"), ("SEED", "few", "usage.invalid-number")],
)
def test_invalid_arguments_of_the_needle_task(build, variable, value, kind) -> None:
    code, table, stderr = build().command("needle-test", **{variable: value})
    assert (code, table) == (2, "")
    error, advice, end = stderr.splitlines()
    assert error.startswith(f"ERROR   {variable}: ") and error.endswith(f" [{kind}]")
    assert value in error and "make help" in advice and end == "EXIT    code 2"
