"""Runs of several processes from the command line: the runner, and torchrun."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.project import ROOT
from lib.runs.run_dir import RunDir, read_status
from tests.integration.conftest import IN_PROCESS

BOTH = {"RA_MLA_ABLATION_MODE": None, "SINGLE_TRAINING": True, "GPUS": 2, "GRAD_ACCUMULATION": 1}
LONG = {**BOTH, "MAX_ITERS": 100000, "CHECKPOINT_INTERVAL": 20}
RUNNER = "all"
# As a file, because an environment that shares the packages of another one lacks its commands.
TORCHRUN = [
    Path(torch.__file__).parent / "distributed/run.py",
    *("--standalone", "--nproc-per-node", "2"),
]
_PATIENCE_SECONDS = 30.0


def wait_for_rows(run: RunDir, count: int) -> list[int]:
    """Wait until the run has ``count`` iterations; return the process ids of its ranks."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not run.metrics.exists() or run.metrics.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "it does not train"
        time.sleep(0.01)
    found: list[int] = json.loads(run.manifest.read_text())["volatile"]["pids"]
    return found


def single(folder: Any) -> RunDir:
    (path,) = folder.runs("")
    return RunDir(path)


def core(run: RunDir) -> list[bytes]:
    return [path.read_bytes() for path in (run.metrics, run.per_query, run.weights, run.sample)]


@pytest.mark.slow
def test_make_and_torchrun_leave_the_same_bytes(build):
    folder = build(**BOTH)
    run = single(folder)
    code, _table, said = folder.command(RUNNER)
    assert code == 0, said
    assert "GPUS" not in said and "Traceback" not in run.logs.read_text()
    made = core(run)
    run.path.rename(run.path.with_name("made"))

    words = [*TORCHRUN, ROOT / IN_PROCESS[0], IN_PROCESS[1], "-O", folder.path]
    code, said, more = folder.server.run([str(word) for word in words], os.environ, folder.scratch)
    assert code == 0, said + more
    assert (said + more).count("DONE") == 1, "one rank speaks"
    assert core(run) == made


def test_without_a_launcher_the_error_has_the_torchrun_command(build):
    folder = build(**BOTH)
    code, _, said = folder.command(*IN_PROCESS)
    assert code == 3
    assert "[ranks.count-mismatch]" in said and "GPUS=2" in said
    assert "torchrun --standalone --nproc-per-node 2" in said
    assert not single(folder).path.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_half_trained_run_goes_on_with_another_number_of_processes(build, before, after):
    divided = {size: {"GPUS": size, "GRAD_ACCUMULATION": 2 // size} for size in (1, 2)}
    folder = build(
        **{**BOTH, **divided[before], "DROPOUT": "0", "MAX_ITERS": 60, "LOG_INTERVAL": 1}
    )
    other = " ".join(f"{name}={value}" for name, value in divided[after].items())
    run = single(folder)
    begun = folder.start(RUNNER)
    wait_for_rows(run, 10)
    os.killpg(begun.pid, signal.SIGINT)
    assert begun.wait(_PATIENCE_SECONDS) == 130, begun.stderr
    status, first = read_status(run), run.metrics.read_bytes()
    assert status and 0 < status.iteration < 60

    code, _, said = folder.command(RUNNER, "--set", other, "--continue")
    assert code == 0, said
    assert f"goes on from iteration {status.iteration} of {run.path.name}" in said
    (moved,) = (RunDir(path) for path in run.path.parent.glob("run-*") if path != run.path)
    assert moved.metrics.read_bytes().startswith(first)
    manifest = json.loads(moved.manifest.read_text())
    (earlier,) = manifest["earlier_divisions"]
    assert (earlier["iterations"], earlier["gpus"]) == (status.iteration, before)
    assert manifest["processes"]["world_size"] == after
    # The old directory is as it was, and the new run differs from one in one piece by rounding.
    assert read_status(run) == status
    assert folder.command(RUNNER)[0] == 0
    tables = [[row["loss"] for row in rows(each)] for each in (moved, run)]
    assert tables[0] == pytest.approx(tables[1], rel=2e-6) and len(tables[0]) == 60


def rows(run: RunDir) -> list[dict[str, Any]]:
    records = map(json.loads, run.metrics.read_text().splitlines())
    return [record for record in records if record["kind"] == "train"]
