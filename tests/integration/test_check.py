"""The make check command: table, record, errors, and no changes to the configuration."""

import json
from xml.etree import ElementTree

import pytest

from tests.build_folder import write_build
from tests.integration.conftest import SMALL

SCRIPT = "check"


def test_checks_are_reported_by_step_and_the_configuration_is_unchanged(build):
    folder = build()
    before = (folder.path / ".config").read_bytes()
    listed = {path.name for path in folder.path.iterdir()}
    code, table, stderr = folder.command(
        SCRIPT, STEPS="1,5", CHECKS="resolve,causal,data", FAST="1"
    )
    assert code == 0, stderr
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
    words = ("--steps", "0", "--checks", "data")
    code, table, _ = folder.command(SCRIPT, *words)
    record = json.loads((folder.path / "check.json").read_text())
    finding, *_ = record["steps"][0]["results"]["data"]["findings"]
    assert code == 1 and finding["property"] == "intact-data" and "SHA-256" in table
    assert "[make check STEPS=0 CHECKS=data]" in table
    (folder.path / "data").rename(folder.path / "gone")
    code, table, _ = folder.command(SCRIPT, *words)
    assert code == 0 and "ABSENT  data:" in table and "make data" in table
    code, table, _ = folder.command(SCRIPT, *words, DATA="require")
    assert code == 1 and table.endswith("0 passed, 1 failed\n")


def test_full_size_needs_are_reported_and_compared_with_the_gpu(build):
    folder = build()
    words = ("--steps", "0,1,2", "--checks", "full_size")
    code, table, stderr = folder.command(SCRIPT, *words, GPU="l4")
    assert code == 0, stderr
    assert "full size, l4" in table and "256,128" in table and "of 22.0" in table
    code, table, _ = folder.command(SCRIPT, *words, CHECK_GPU_MEMORY_GB="1.0001")
    assert code == 1 and "BATCH_SIZE=2 fits 1.0001 GiB" in table
    assert "CHECK_GPU_MEMORY_GB=1.0001 STEPS=0 CHECKS=full_size]" in table
    record = json.loads((folder.path / "check.json").read_text())
    result = record["steps"][0]["results"]["full_size"]
    assert [finding["property"] for finding in result["findings"]] == ["fits-memory"]
    facts = result["facts"]
    assert facts["parameters"] == 256_128 and facts["largest_micro_batch"] == 0


def test_a_step_that_does_not_resolve_is_a_row(build):
    folder = build()
    write_build(folder.path, SMALL | {"N_LAYER": 1})
    code, text, stderr = folder.command(SCRIPT, CHECKS="resolve", JSON="1", STEPS="0,3")
    baseline, gate = (step["results"]["resolve"] for step in json.loads(text)["steps"])
    assert (code, baseline["state"], gate["state"]) == (1, "passed", "failed"), stderr
    assert gate["findings"][0]["property"] == "resolved-configuration"
    assert "MLP_ATTN_GATE" in gate["findings"][0]["found"]
    assert gate["repeat"] == "make check STEPS=3 CHECKS=resolve"


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("--checks", "causl"), ("[usage.unknown-check]", "nearest: causal")),
        (("--check-gpu-memory-gb", "8", "--gpu", "l4"), ("[usage.conflict]",)),
        (("--data", "maybe"), ("[usage.invalid-value]", "DATA", "'maybe'")),
    ],
)
def test_an_invalid_argument_is_reported(build, words, texts):
    code, _, stderr = build().command(SCRIPT, *words)
    assert (code, [text for text in texts if text not in stderr]) == (2, []), stderr


def test_junit_has_a_test_for_each_check(build):
    folder = build()
    file = folder.path / "ci" / "junit.xml"
    write_build(folder.path, SMALL | {"N_LAYER": 1})
    code, *_ = folder.command(SCRIPT, CHECKS="resolve", STEPS="0,3", JUNIT=str(file))
    suite = ElementTree.parse(file).getroot()
    assert (code, suite.get("tests"), suite.get("failures")) == (1, "2", "1")
    passed, failed = suite.findall("testcase")
    assert (passed.get("classname"), passed.get("name"), list(passed)) == (
        "ratio/00-baseline",
        "resolve",
        [],
    )
    (failure,) = failed.findall("failure")
    assert failure.get("type") == "resolved-configuration"
    assert "MLP_ATTN_GATE" in failure.get("message")


def test_a_single_training_and_a_matrix_are_checked(build):
    folder = build(RA_MLA_ABLATION_MODE=None, TEST_MATRIX_MODE=True)
    code, table, stderr = folder.command(SCRIPT, CHECKS="declared,pruned", STEPS="*magnitude")
    assert code == 0, stderr
    assert table.count("matrix/") == 2 and table.endswith("4 passed, 0 failed\n")
    code, table, _ = folder.command(SCRIPT, CHECKS="resolve", DEFCONFIG="gpt2-124m")
    assert code == 0 and "single/run" in table
