"""Runs of several processes from the command line: the runner, and torchrun."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from lib.project import ROOT
from lib.runs.run_dir import RunDir, read_status
from tests.integration.conftest import IN_PROCESS, SINGLE, wait_for

BOTH = {**SINGLE, "GPUS": 2, "GRAD_ACCUMULATION": 1}
# As a file, because an environment that shares the packages of another one lacks its commands.
TORCHRUN = [
    Path(torch.__file__).parent / "distributed/run.py",
    *("--standalone", "--nproc-per-node", "2"),
]


def core(run: RunDir) -> list[bytes]:
    return [path.read_bytes() for path in (run.metrics, run.per_query, run.weights, run.sample)]


@pytest.mark.slow
def test_make_and_torchrun_leave_the_same_bytes(build):
    folder = build(**BOTH)
    (run,) = map(RunDir, folder.runs(""))
    code, _, said = folder.command(*IN_PROCESS)
    assert code == 3 and not run.path.exists()
    assert "[ranks.count-mismatch]" in said and "GPUS=2" in said
    assert "torchrun --standalone --nproc-per-node 2" in said
    code, _, said = folder.command("all")
    assert code == 0, said
    assert "GPUS" not in said and "Traceback" not in run.logs.read_text()
    made = core(run)
    run.path.rename(run.path.with_name("made"))

    words = [*TORCHRUN, ROOT / IN_PROCESS[0], IN_PROCESS[1], "-O", folder.path]
    # The interpreter of the ranks.
    variables = {**os.environ, "PYTHON_EXEC": str(folder.server.interpreter())}
    code, said, more = folder.server.run([str(word) for word in words], variables, folder.scratch)
    assert code == 0, said + more
    assert (said + more).count("DONE") == 1, "one rank speaks"
    assert core(run) == made


@pytest.mark.slow
def test_a_half_trained_run_goes_on_with_another_number_of_processes(build):
    folder = build(**BOTH, MAX_ITERS=60, LOG_INTERVAL=1)
    (run,) = map(RunDir, folder.runs(""))
    begun = folder.start("all")
    wait_for(lambda: run.metrics.exists() and run.metrics.read_bytes().count(b"\n") >= 5, begun)
    os.killpg(begun.pid, signal.SIGINT)
    assert begun.wait() == 130, begun.stderr
    status, first = read_status(run), run.metrics.read_bytes()
    assert status and 0 < status.iteration < 60

    settings = "GPUS=1 GRAD_ACCUMULATION=2"
    code, _, said = folder.command("all", "--set", settings, "--continue")
    assert code == 0, said
    assert f"goes on from iteration {status.iteration} of {run.path.name}" in said
    (moved,) = (RunDir(path) for path in run.path.parent.glob("run-*") if path != run.path)
    assert moved.metrics.read_bytes().startswith(first)
    manifest = json.loads(moved.manifest.read_text())
    (earlier,) = manifest["earlier_divisions"]
    assert (earlier["iterations"], earlier["gpus"]) == (status.iteration, 2)
    assert manifest["processes"]["world_size"] == 1
    # The old directory is as it was.
    assert read_status(run) == status
