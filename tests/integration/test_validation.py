"""Machine validation, from the command line."""

import json


def test_machine_validation_as_json(build):
    script = "validate-machine"
    code, text, said = build().command(script, "--device", "cpu", JSON="1")
    assert code == 0, said
    document = json.loads(text)
    assert document["schema_version"] == 1
    states = {(row["backend"], row["state"]) for row in document["rows"]}
    assert states == {("blocks", "PASS"), ("gather", "PASS"), ("triton", "ABSENT")}
    assert said.startswith("CHECK   ")
