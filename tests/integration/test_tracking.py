"""Failing trackers, seen from the command line."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from lib.project import ROOT
from lib.runs.run_dir import RunDir
from tests.loopback.stores import trackio_history, wandb_history


@pytest.fixture(scope="session")
def own_mounts() -> None:
    """Skip unless processes can mount file systems in a user namespace."""
    probe = ["unshare", "-Urm", "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs unshare and user namespaces")


# Tracker, its folder below the study, and a size in KiB that suffices only for the start.
@pytest.mark.parametrize(
    ("tracker", "where", "size"),
    [
        ("wandb", "{run}/trackers/wandb", 20),
        ("trackio", "trackio", 12),
        ("tensorboard", "{run}/trackers/tensorboard", 8),
        ("tensorboard", "{run}/trackers", 4),
    ],
)
@pytest.mark.long
def test_a_disk_that_is_full_for_a_tracker_alone(build, own_mounts, tracker, where, size):
    """Fill the tracker's own small file system, then send everything to a larger one."""
    settings = {f"TRACKER_{tracker.upper()}": True, "TRACKER_WANDB_MODE_OFFLINE": True}
    if tracker != "wandb":
        del settings["TRACKER_WANDB_MODE_OFFLINE"]
    folder = build(MAX_ITERS=60, LOG_INTERVAL=5, EVAL_INTERVAL=30, **settings)
    (path,) = folder.runs("0")
    run, full = RunDir(path), path.parent / where.format(run=path.name)
    full.mkdir(parents=True)
    mount = f'mount -t tmpfs -o size={size}k tmpfs "$0" && exec "$@"'
    script = [sys.executable, str(ROOT / "scripts/run_test_matrix.py"), "-O", str(folder.path)]
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount, str(full), *script],
        env={**os.environ, "STEPS": "0", "ALLOW_DIRTY": "y"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("WARN")]
    metrics = run.metrics.read_bytes()
    assert metrics.count(b'"kind":"train"') == 60
    if size == 4:
        # Even the facts for the trackers cannot be written.
        assert "[Errno 28] No space left on device" in line
        return
    assert f"tracker_{tracker}" in line
    # For wandb, it depends on the file that no longer fits.
    causes = {"tensorboard": ["No space left"], "trackio": ["[tracker.data-lost]"]}
    either = [cause for known in causes.values() for cause in known]
    assert any(cause in line for cause in causes.get(tracker, either))
    # The small file system is gone with its content, which looks like an emptied folder.
    subprocess.run(line.partition("type: ")[2], shell=True, check=True)
    assert json.loads((run.trackers / f"tracker_{tracker}.json").read_text())["complete"]
    if tracker != "tensorboard":
        history, _ = (wandb_history if tracker == "wandb" else trackio_history)(run)
        assert sorted(history["train_loss"]) == [*range(1, 61)]
