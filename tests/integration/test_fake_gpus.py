"""Several GPUs on one machine: planned, shown, used, and lost. The GPUs are fake."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from lib.project import ROOT
from lib.runs.run_dir import RunDir, State, read_status

GPUS = {"DEVICE_CPU": None, "DEVICE_CUDA": True, "CPU_THREADS": 1}


@pytest.fixture
def machine(build) -> Callable[..., Any]:
    """Return a function that trains steps on fake GPUs: exit code, stderr, states, the journal."""

    def train(steps: str, settings: str = "", **given: Any) -> Any:
        folder = build(**GPUS)
        journal = folder.scratch / "journal"
        fake = {"count": 4, "busy": None, "lost": [], "seconds": 1.5, "journal": str(journal)}
        variables = {"FAKE_GPUS": json.dumps({**fake, **given}), "PYTHONPATH": str(ROOT)}
        words = ["--steps", steps, "--allow-dirty", *(["--set", settings] if settings else [])]
        code, _, said = folder.command(
            "tests/integration/fake_gpus.py", "all", *words, "--worker", **variables
        )
        assert journal.exists(), said
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        statuses = [read_status(RunDir(path)) for path in (folder.path / "results/ratio").iterdir()]
        return code, said, [status.state for status in statuses if status], lines

    return train


def test_runs_are_placed_one_to_a_gpu_and_shown_there(machine):
    code, said, states, lines = machine("0-4")
    assert code == 0 and states == [State.SUCCESS] * 5, said
    used = [line["gpus"] for line in lines]
    assert sorted(used[:4]) == [["0"], ["1"], ["2"], ["3"]]
    # The first four at the same time, the fifth on the GPU that is free first.
    assert lines[3]["at"] < lines[0]["at"] + 1.5 <= lines[4]["at"]
    assert "4 group(s) of GPUS=1" in said
    assert all(f"GPU {n}" in said for n in range(4)), said


def test_a_run_of_several_processes_takes_as_many_gpus_and_leaves_a_busy_one(machine):
    two = "GPUS=2 BATCH_SIZE=1 GRAD_ACCUMULATION=2"
    code, said, states, lines = machine("0-2", two, count=6, busy=1)
    assert code == 0 and states == [State.SUCCESS] * 3, said
    assert "GPU 1 (87.9 GiB)" in said and "2 group(s) of GPUS=2" in said
    ranks = {line["run"]: [] for line in lines}
    for line in lines:
        ranks[line["run"]].append((line["rank"], line["world"], line["gpus"]))
    placed = [sorted(each) for each in ranks.values()]
    assert all([(r, w) for r, w, _ in each] == [(0, 2), (1, 2)] for each in placed)
    assert all(each[0][2] == each[1][2] for each in placed), "both ranks see both GPUs"
    assert {tuple(each[0][2]) for each in placed} == {("0", "2"), ("3", "4")}


def test_a_lost_gpu_gets_no_other_run_and_its_run_goes_on_elsewhere(machine):
    code, said, states, lines = machine("0-3", count=2, lost=["1"], seconds=0.5)
    assert code == 0 and states == [State.SUCCESS] * 4, said
    assert [line["gpus"] for line in lines].count(["1"]) == 1
    assert "GPU 1 is not used any more: CUDA error: GPU is lost" in said and "FAIL" not in said


def test_without_a_gpu_left_the_runs_wait_for_the_next_make(machine):
    code, said, states, lines = machine("0-3", count=2, lost=["0", "1"], seconds=0.5)
    assert code == 1 and states == [State.INTERRUPTED] * 2, said
    assert len(lines) == 2 and "0 done, 0 failed, 4 left; to resume" in said
