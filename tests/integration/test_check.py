"""The make check command: table, record, errors, and no changes to the configuration."""

import json
from xml.etree import ElementTree

from tests.build_folder import write_build
from tests.integration.conftest import SMALL


def test_checks_are_reported_by_step_and_the_configuration_is_unchanged(build):
    folder = build()
    before = (folder.path / ".config").read_bytes()
    listed = {path.name for path in folder.path.iterdir()}
    words = {"STEPS": "1,5", "CHECKS": "resolve,causal,data", "FAST": "1"}
    code, table, said = folder.command("check", **words)
    assert code == 0, said
    assert table.splitlines()[0].split() == ["step", "resolve", "causal", "data"]
    assert "ratio/05-ra" in table and table.endswith("\n6 passed, 0 failed\n")
    assert (folder.path / ".config").read_bytes() == before
    assert {path.name for path in folder.path.iterdir()} - listed == {"check.json"}
    record = json.loads((folder.path / "check.json").read_text())
    assert (record["schema_version"], record["passed"], record["failed"]) == (1, 6, 0)
    repeat = record["steps"][1]["results"]["causal"]["repeat"]
    assert repeat == "make check STEPS=5 CHECKS=causal"


def test_data_that_is_damaged_or_required_fails(build):
    folder = build()
    (shard,) = folder.path.glob("data/custom-*/train-*.bin")
    shard.write_bytes(shard.read_bytes()[:-2] + b"\0\0")
    words = ("check", "--steps", "0", "--checks", "data")
    code, table, _ = folder.command(*words)
    assert code == 1 and "SHA-256" in table and "[make check STEPS=0 CHECKS=data]" in table
    (folder.path / "data").rename(folder.path / "gone")
    code, table, _ = folder.command(*words)
    assert code == 0 and "ABSENT  data:" in table and "make data" in table
    code, table, _ = folder.command(*words, DATA="require")
    assert code == 1 and table.endswith("0 passed, 1 failed\n")


def test_full_size_needs_are_reported_and_compared_with_the_gpu(build):
    folder = build()
    words = ("check", "--steps", "0", "--checks", "full_size")
    code, table, said = folder.command(*words, GPU="l4")
    assert code == 0, said
    assert "full size, l4" in table and "256,128" in table and "of 22.0" in table
    code, table, _ = folder.command(*words, CHECK_GPU_MEMORY_GB="1.0001")
    assert code == 1 and "BATCH_SIZE=2 fits 1.0001 GiB" in table
    assert "CHECK_GPU_MEMORY_GB=1.0001 STEPS=0 CHECKS=full_size]" in table


def test_a_step_that_does_not_resolve_is_a_row_and_a_failure_of_junit(build):
    folder = build()
    file = folder.path / "ci" / "junit.xml"
    write_build(folder.path, SMALL | {"N_LAYER": 1})
    words = {"CHECKS": "resolve", "STEPS": "0,3", "JUNIT": str(file)}
    code, text, said = folder.command("check", JSON="1", **words)
    baseline, gate = (step["results"]["resolve"] for step in json.loads(text)["steps"])
    assert (code, baseline["state"], gate["state"]) == (1, "passed", "failed"), said
    assert gate["findings"][0]["property"] == "resolved-configuration"
    assert "MLP_ATTN_GATE" in gate["findings"][0]["found"]
    suite = ElementTree.parse(file).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    passed, failed = suite.findall("testcase")
    named = (passed.get("classname"), passed.get("name"), list(passed))
    assert named == ("ratio/00-baseline", "resolve", [])
    (failure,) = failed.findall("failure")
    assert failure.get("type") == "resolved-configuration"
    assert "MLP_ATTN_GATE" in failure.get("message")


def test_a_single_training_and_a_matrix_are_checked(build):
    folder = build(RA_MLA_ABLATION_MODE=None, TEST_MATRIX_MODE=True)
    code, table, stderr = folder.command("check", CHECKS="declared,pruned", STEPS="adamw-magnitude")
    assert code == 0, stderr
    assert "matrix/" in table and table.endswith("2 passed, 0 failed\n")
    code, table, _ = folder.command("check", CHECKS="resolve", DEFCONFIG="gpt2-124m")
    assert code == 0 and "single/run" in table
