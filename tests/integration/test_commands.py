"""Commands that need no trained run: data, validation, repetition, the probe, errors before training."""

import json
import signal
from dataclasses import replace

import pytest

from lib.runs.run_dir import RunDir, State, read_status
from tests.integration.conftest import IN_PROCESS, SINGLE, STEP, wait_for

RANKS = {"GPUS": 2, "BATCH_SIZE": 1, "DATA_PARALLEL_FSDP": True}


def test_data_is_prepared_once_and_verified_and_damage_is_reported(build):
    folder = build()
    (made,) = (folder.path / "data").glob("custom-byte-*")
    # The data do not depend on the micro-batch: nothing is predicted for an automatic one.
    code, printed, said = folder.command("data", SET="BATCH_SIZE=0")
    assert (code, printed) == (0, "")
    assert said.startswith(f"DATA    {made} ") and said.count("\n") == 1
    code, printed, said = folder.command("data", "--verify", JSON="1")
    document = json.loads(printed)
    assert code == 0 and document["folder"] == str(made)
    assert f"digest {document['digest']}" in said
    shard = made / "train-00000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for command in (("data", "--verify"), (*IN_PROCESS, STEP, "0")):
        code, _, said = folder.command(*command)
        assert code == 3 and f"{shard}: " in said and "[data.damaged]" in said
        assert "&& make data" in said
    assert not (folder.path / "results").exists()
    made.rename(folder.path / "gone")
    code, _, said = folder.command("data", "--verify")
    assert code == 3 and "[data.missing]" in said and "type: make data" in said
    assert not made.exists()


def test_the_machine_is_validated(build):
    code, text, said = build().command("validate-machine", "--device", "cpu", JSON="1")
    assert code == 0, said
    states = {(row["backend"], row["state"]) for row in json.loads(text)["rows"]}
    assert states == {("blocks", "PASS"), ("gather", "PASS"), ("triton", "ABSENT")}


def test_a_training_twice_has_the_same_bytes(build):
    folder = build()
    code, told, said = folder.command("reproduce", TWICE="1", STEPS="1")
    assert code == 0 and told.startswith("BITWISE\n"), said
    assert "first s1" in said and "second s1" in said and not (folder.path / "results").exists()


@pytest.mark.parametrize("settings", [{}, RANKS], ids=["one process", "two ranks"])
def test_the_plan_has_measured_steps(build, settings):
    folder = build(**SINGLE, EVAL_INTERVAL=2, **settings)
    plan = folder.start("plan", "--probe", "--json", python=folder.server.interpreter())
    assert plan.wait() == 0, plan.stderr
    (run,) = json.loads(plan.stdout)["runs"]
    probe = run["probe"]
    assert run["seconds_from"] == "probe" and run["evaluations"] == 2
    # Two micro-batches, four steps.
    assert probe["timed_micro_batches"] == 2 and 0 < probe["step_seconds"] < 60
    expected = 4 * probe["step_seconds"] + 2 * probe["evaluation_seconds"]
    assert abs(run["seconds"] - expected) < 1e-9


def test_ctrl_c_ends_the_probe(build):
    plan = build().start("plan", "--probe")
    # The command, the server of the workers and its tracker, and a worker.
    wait_for(lambda: len(plan.processes()) >= 4, plan)
    plan.signal(signal.SIGINT)
    assert plan.wait(60) == 130 and "Traceback" not in plan.stderr, plan.stderr
    wait_for(lambda: not plan.processes())


def test_one_run_in_this_process_requires_a_selection(build):
    folder = build(SEED_LIST="1,2")
    code, _, said = folder.command(*IN_PROCESS, STEP, "2")
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


def test_the_script_of_a_step_takes_the_options_of_the_earlier_system(build):
    folder = build()
    script = IN_PROCESS[0]
    code, table, said = folder.command(script, STEP, "ra")
    assert code == 0 and "| ra " in table, said
    assert read_status(RunDir(folder.runs("5")[0])).state is State.SUCCESS
    code, _, said = folder.command(script, "--max-iters", "3")
    assert code == 2 and STEP in said and "[usage.invalid-argument]" in said
    code, _, said = folder.command(script, STEP, "5", "--optimizer", "lion", "--max-iters", "many")
    assert code == 2
    assert "OPTIMIZER_LION=y: " in said and "[config.unknown-symbol]" in said
    assert "MAX_ITERS=many: " in said and "[config.wrong-type]" in said


def test_a_dry_run_checks_needs_no_data_and_writes_nothing(build):
    folder = build(DRY_RUN=True)
    (folder.path / "data").rename(folder.path / "gone")
    code, table, said = folder.command("all", STEPS="17")
    assert code == 0, said
    assert table.endswith("passed, 0 failed\n") and "ratio/17-ract-weights" in table
    assert "causal" in table and "gradients" not in table
    assert not (folder.path / "results").exists()


@pytest.mark.parametrize("below", ["empty", "."])
def test_a_step_needs_neither_a_configuration_nor_one_of_the_study(build, tmp_path, below):
    folder = replace(build(**SINGLE), path=tmp_path / below)
    code, table, said = folder.command(IN_PROCESS[0], STEP, "7", "--dry-run")
    assert code == 0 and "ratio/07-ra-golden-mech" in table, said
    assert table.endswith("passed, 0 failed\n")


@pytest.mark.parametrize(
    ("settings", "words", "code", "parts"),
    [
        (
            {"DEVICE_CPU": None, "DEVICE_CUDA": True},
            {"CUDA_VISIBLE_DEVICES": ""},
            3,
            ("[gpu.missing]", "DEVICE=cuda"),
        ),
        ({}, {"SWEEP": "DROPOUT=0.1,7"}, 2, ("DROPOUT: ", "0.9", "[config.out-of-range]")),
    ],
)
def test_an_error_before_training_writes_nothing(build, settings, words, code, parts):
    folder = build(**settings)
    (folder.path / "data").rename(folder.path / "gone")
    found, table, said = folder.command("all", **words)
    assert (found, table, said.count("ERROR")) == (code, "", 1)
    assert [part for part in parts if part not in said] == [], said
    assert not (folder.path / "results").exists() and not (folder.path / "data").exists()
