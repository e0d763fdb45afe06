"""The command line that prepares and verifies data."""

import json
import shutil

from tests.integration.conftest import IN_PROCESS, STEP


def test_prepared_once_verified_and_damage_is_reported(build):
    folder = build()
    code, printed, said = folder.command("data")
    assert code == 0 and said.splitlines()[-1].startswith("DATA ")
    (made,) = (folder.path / "data").glob("custom-byte-*")
    assert printed == ""
    # The data do not depend on the micro-batch: nothing is predicted for an automatic one.
    code, again, said = folder.command("data", SET="BATCH_SIZE=0")
    assert (code, again) == (0, printed)
    assert said.startswith(f"DATA    {made} ") and said.count("\n") == 1

    code, printed, said = folder.command("data", "--verify", JSON="1")
    assert code == 0 and f"{made}: " in said
    document = json.loads(printed)
    assert document["folder"] == str(made) and f"digest {document['digest']}" in said
    shard = made / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, said = folder.command("data", "--verify")
    assert code == 3 and f"{shard}: " in said and "[data.damaged]" in said
    assert "&& make data" in said
    code, _, trained = folder.command(*IN_PROCESS, STEP, "0")
    assert code == 3 and f"{shard}: " in trained and "[data.damaged]" in trained
    assert not (folder.path / "results").exists()

    shutil.rmtree(made)
    code, _, said = folder.command("data", "--verify")
    assert code == 3 and "[data.missing]" in said and "type: make data" in said
    assert not made.exists()
