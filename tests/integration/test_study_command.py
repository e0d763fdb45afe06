"""ON_STUDY_DONE_CMD of a real study: once when it ends, fails or stops, with its document."""

import json
import shlex
import sys
import time

from lib.runs.run_dir import RunDir

TRAIN = "all"
# Each document on a line of its own.
APPEND = "import json, sys; print(json.dumps(json.load(sys.stdin)), file=open(sys.argv[1], 'a'))"


def hook(file) -> str:
    return shlex.join([sys.executable, "-c", APPEND, str(file)])


def states(file) -> list[list[str]]:
    """Return the states of the runs in each document that the command has read."""
    documents = map(json.loads, file.read_text().splitlines())
    return [[run["state"] for run in document["runs"]] for document in documents]


def test_a_study_starts_it_once_and_its_workers_never(build, tmp_path):
    file = tmp_path / "read"
    folder = build(ON_STUDY_DONE_CMD=hook(file), SEED_LIST="1,2")
    # As in a job of SLURM: a worker writes no report.
    code, _, said = folder.command(TRAIN, "--worker", "--runs", "baseline", STEPS="0,1")
    assert code == 0 and not file.exists(), said
    code, _, said = folder.command(TRAIN, STEPS="0,1")
    assert code == 0 and states(file) == [["done"] * 4], said
    code, _, said = folder.command(TRAIN, STEPS="0,1")
    assert code == 0 and len(states(file)) == 1, said
    # No file of the results has the command.
    files = [path for path in folder.path.glob("results/**/*") if path.is_file()]
    assert not [path for path in files if b"json.load(sys.stdin)" in path.read_bytes()]


def test_a_stopped_study_starts_it_and_the_resumed_one_again(build, tmp_path):
    file = tmp_path / "read"
    folder = build(ON_STUDY_DONE_CMD=hook(file), MAX_ITERS=600, LOG_INTERVAL=1)
    (run,) = map(RunDir, folder.runs("0"))
    make = folder.start(TRAIN, STEPS="0")
    deadline = time.monotonic() + 120
    while not run.metrics.exists():
        assert make.poll() is None and time.monotonic() < deadline, make.stderr
        time.sleep(0.02)
    code, _, said = folder.command("stop")
    assert code == 0, said
    assert make.wait() == 130 and states(file) == [["interrupted"]], make.stderr
    code, _, said = folder.command(TRAIN, STEPS="0")
    assert code == 0 and states(file) == [["interrupted"], ["done"]], said


def test_looks_start_it_once_with_their_words(build, tmp_path):
    file = tmp_path / "read"
    looks = {"VERDICT_LOOKS": "3,4", "VERDICT_SPEND": ".4,.5", "VERDICT_AA": False}
    folder = build(ON_STUDY_DONE_CMD=hook(file), RA_MLA_ABLATION_STEPS="0-1", **looks)
    code, _, said = folder.command(TRAIN, "--strict", SEEDS="auto")
    assert code in (0, 5), said
    (document,) = map(json.loads, file.read_text().splitlines())
    (verdict,) = document["verdicts"]
    assert verdict["verdict"] is not None and verdict["n"] >= 3
    assert {run["state"] for run in document["runs"]} == {"done"}
    written = json.loads((folder.path / "results/ratio/verdicts.json").read_text())
    assert written == document
