"""The run commands end to end: real training of a very small model."""

import json
import re

import pytest

from lib.runs.run_dir import RunDir, State, read_status
from tests.integration.conftest import IN_PROCESS, STEP


def test_i10_trains_reports_skips_and_trains_again(build):
    folder = build()
    code, table, said = folder.command("all", STEPS="0,1,full")
    assert code == 0, said
    assert re.search(r"\| +1 \| pruned-50 .* n=1 .* 50\.0% \| done +\|", table)
    assert "the loss of token frequencies alone" in table
    results = folder.path / "results/ratio"
    assert table.startswith((results / "table.md").read_text())
    assert "results/ratio/report.html" in table.splitlines()[-1]
    assert "pruned-50" in (results / "report.html").read_text()
    weights = [RunDir(path).weights.read_bytes() for path in folder.runs("0,1,full")]

    code, text, said = folder.command("all", STEPS="0,1,full", JSON="1")
    assert code == 0 and "3 of 3 done" in said and "TRAIN" not in said
    rows = json.loads(text)["rows"]
    assert [row["slug"] for row in rows] == ["baseline", "pruned-50", "full"]
    assert rows[1]["sparsity"] == pytest.approx(0.5, abs=1e-3)

    code, _, said = folder.command("rerun", "pruned-50")
    assert code == 2 and "YES=1" in said
    code, _, said = folder.command("rerun", "pruned-50", YES="1")
    assert code == 0 and "baseline" not in said
    assert re.search(r"^RERUN .* pruned-50-s1-\w+\.old-", said, re.MULTILINE)
    # The same configuration and seed: the same bytes.
    assert [RunDir(path).weights.read_bytes() for path in folder.runs("0,1,full")] == weights


def test_trains_one_run_in_this_process_and_requires_a_selection(build):
    folder = build(SEED_LIST="1,2")
    for words in ((), (STEP, "2")):
        code, _, said = folder.command(*IN_PROCESS, *words)
        assert code == 2 and "[usage.not-one-run]" in said and "--seed 1 --in-process" in said
    first, second = folder.runs("2")
    # The request that stopped an earlier process.
    second.mkdir(parents=True)
    RunDir(second).stop_request.touch()
    code, _, said = folder.command(*IN_PROCESS, STEP, "2", "--seed", "2")
    assert code == 0 and "DONE" in said, said
    assert "golden-s2" in second.name and not first.exists()
    assert read_status(RunDir(second)).state is State.SUCCESS
    assert "SKIP" in folder.command(*IN_PROCESS, STEP, "2", "--seed", "2")[2]


def test_a_step_by_number_is_the_same_run_as_makes(build):
    folder = build()
    script = "gpt2/train_ra_mla.py"
    code, table, said = folder.command(script, "--ra-mla-ablation-step", "ra")
    assert code == 0, said
    assert "| ra " in table
    code, _, said = folder.command(script, "--max-iters", "3")
    assert code == 2 and "--ra-mla-ablation-step" in said and "[usage.invalid-argument]" in said
    assert read_status(RunDir(folder.runs("5")[0])).state is State.SUCCESS
    flags = ("--ra-mla-ablation-step", "5", "--optimizer", "lion", "--max-iters", "many")
    code, _, said = folder.command(script, *flags)
    assert code == 2
    assert re.search(r"OPTIMIZER_LION=y: .*\[config.unknown-symbol\]", said)
    assert re.search(r"MAX_ITERS=many: .*\[config.wrong-type\]", said)


def test_a_dry_run_needs_no_data_and_writes_nothing(build):
    folder = build(DRY_RUN=True)
    (folder.path / "data").rename(folder.path / "gone")
    code, table, said = folder.command("all", STEPS="17")
    assert code == 0, said
    assert table.endswith("passed, 0 failed\n") and "ratio/17-ract-weights" in table
    # The fast checks, and a line before the first result.
    assert re.search(r"^CHECK +1 step: resolve, ", said, re.MULTILINE)
    assert "causal" in table and "gradients" not in table
    assert not (folder.path / "results").exists()


def test_an_absent_device_is_told_before_anything_is_created_or_prepared(build):
    folder = build(DEVICE_CPU=None, DEVICE_CUDA=True)
    (folder.path / "data").rename(folder.path / "gone")
    code, _, said = folder.command("all", CUDA_VISIBLE_DEVICES="")
    assert code == 3
    assert "[gpu.missing]" in said and "DEVICE=cuda" in said
    assert not (folder.path / "results").exists() and not (folder.path / "data").exists()
