"""Running trainings, watched and stopped from another process."""

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from lib.errors import EXIT_INTERRUPTED
from lib.runs.lease import current_holder, read_lease
from lib.runs.run_dir import RunDir, State, read_status
from tests.integration.conftest import wait_for
from tests.json_rows import read_rows


@pytest.fixture
def at_work(build, tmp_path) -> Iterator[tuple]:
    """Start a study of two steps that would train for an hour; wait for both to log.

    At this rate the loss stays where it starts, however late a test looks at it.
    """
    folder = build(
        MAX_ITERS=1_000_000,
        LEARNING_RATE="1e-9",
        MIN_LEARNING_RATE="1e-9",
        LOG_INTERVAL=1,
        JOBS=2,
        ON_STUDY_DONE_CMD=f"tee {tmp_path}/read",
    )
    process = folder.start("all", STEPS="0,2")
    try:
        for path in folder.runs("0,2"):
            wait_for(lambda: _trains(RunDir(path)))
        yield folder, process
    finally:
        process.signal(signal.SIGINT)
        process.wait(60)


def _trains(run: RunDir) -> bool:
    beats = run.heartbeats()
    return 0 in beats and any(row["msg"] == "train" for row in read_rows(beats[0]))


def test_they_are_shown_and_stopped_one_by_one_and_all(at_work):
    folder, process = at_work
    paths = [RunDir(path) for path in folder.runs("0,2")]
    code, text, said = folder.command("watch", "--json", STEPS="0,2")
    # Exit code 1 if the speed has changed, which is possible on a busy machine.
    assert code in (0, 1), text + said
    lines = json.loads(text)["runs"]
    assert [(line["run"].split()[0], line["state"]) for line in lines] == [
        ("ratio/00-baseline", "running"),
        ("ratio/02-golden", "running"),
    ]
    for line in lines:
        assert line["iteration"] >= 1 and line["iterations"] == 1_000_000
        assert line["loss"] > 1 and line["tokens_per_second"] > 0 and line["memory_mib"] > 50
        # A busy machine may change the speed of so small a model by any factor, and its loss has
        # the noise of its batches.
        assert line["alarms"].keys() <= {"throughput", "unstable"}

    # On SIGUSR1 a run logs its stack and continues.
    lease = read_lease(paths[0])
    assert lease and lease.holder
    os.kill(lease.holder.worker, signal.SIGUSR1)
    wait_for(lambda: "most recent call first" in paths[0].logs.read_text())

    code, _, said = folder.command("stop", "--runs", "golden", STEPS="0,2")
    assert code == 0 and re.search(r"^STOP +ratio/02-golden s1 ", said, re.M)
    # The lease is released after the status is written.
    wait_for(lambda: current_holder(paths[1]) is None)
    assert read_status(paths[1]).state is State.INTERRUPTED
    assert read_status(paths[0]).state is State.RUNNING
    assert list(paths[1].checkpoints.iterdir())
    code, _, said = folder.command("stop", "--runs", "golden", STEPS="0,2")
    assert code == 2 and "[run.not-active]" in said

    code, _, said = folder.command("stop", STEPS="0,2")
    assert code == 0 and f"process {process.pid};" in said
    assert process.wait(60) == EXIT_INTERRUPTED
    assert read_status(paths[0]).state is State.INTERRUPTED
    document = json.loads((folder.path / "read").read_text())
    assert [run["state"] for run in document["runs"]] == ["interrupted"] * 2
    code, _, said = folder.command("stop", STEPS="0,2")
    assert code == 2 and "[run.not-active]" in said
