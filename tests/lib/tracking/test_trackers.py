"""Data that a tracker has not stored is noticed, with the real libraries."""

import pytest

from lib.runs.run_dir import RunDir
from lib.tracking.options import TrackerWandbOptions
from lib.tracking.trackers import TrackerMetadata, TrackerWandb


@pytest.mark.slow
def test_a_cut_offline_file_of_wandb_counts_as_lost(tracked, tmp_path):
    run = RunDir(tmp_path)
    run.trackers.mkdir()
    tracker = TrackerWandb(TrackerWandbOptions("offline", ""), run)
    tracker.start(TrackerMetadata.read(tracked.tracker_facts), resumed=False)
    for iteration in (1, 2, 3):
        tracker.log({"train_loss": 1.0}, iteration)
    # A new process would write to another file.
    assert tracker.stored(3) == 0
    tracker.finish(1, {"manifest_sha256": "0"})
    assert tracker.stored(3) == 3
    (file,) = tmp_path.glob("trackers/wandb/offline-run-*/*.wandb")
    file.write_bytes(file.read_bytes()[:-1])
    assert tracker.stored(3) == 0
