"""The run "verdicts" of a study: its table in each tracker is that of the record, and no other."""

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from lib.runs.run_dir import RunDir
from lib.tracking.config import TrackingConfig
from lib.tracking.options import (
    TrackerOptions,
    TrackerTensorboardOptions,
    TrackerTrackioOptions,
    TrackerWandbOptions,
)
from lib.tracking.sources import WandbOfflineSource
from lib.tracking.tracker import TrackerTable
from lib.tracking.verdict_run import send_verdicts
from tests.loopback.wandb_server import serving

HEADER = ("comparison", "verdict", "difference", "remarks")
BETTER = ("wide vs base", "BETTER", -0.0062, "")
DIVERGED = ("gate vs base", "DIVERGED 2/5", None, "seeds 1, 4")
SYMBOLS = {
    "TRACKER_WANDB": True,
    "TRACKER_WANDB_ENTITY": "",
    "TRACKER_TENSORBOARD": True,
    "TRACKER_TRACKIO": True,
}


class Study:
    """A study whose verdicts are sent."""

    def __init__(self, folder: Path, tracker: TrackerOptions, mode: str = "offline") -> None:
        self.folder, self.warnings = folder / "ratio", list[str]()
        self.folder.mkdir()
        self.trackers = RunDir(self.folder / "verdicts").trackers
        self._tracking = TrackingConfig((tracker,), project="", run_name="")
        self._symbols = {**SYMBOLS, "TRACKER_WANDB_MODE": mode, "ON_DONE_CMD": "true a-token"}

    def send(self, *rows: Sequence) -> None:
        table = TrackerTable(HEADER, rows)
        send_verdicts(self.folder, self._tracking, self._symbols, table, self.warnings.append)


def test_tensorboard_has_the_newest_table_only(tmp_path):
    study = Study(tmp_path, TrackerTensorboardOptions())
    study.send()
    assert not study.trackers.exists()
    study.send(BETTER, DIVERGED)
    (first,) = (study.trackers / "tensorboard").iterdir()
    facts = json.loads((study.trackers / "facts.json").read_text())
    run_id = facts["id"]
    # A command, in which a token may stand.
    assert facts["symbols"]["ON_DONE_CMD"] == ""
    # The same table again starts no process.
    study.send(BETTER, DIVERGED)
    assert [first] == [*(study.trackers / "tensorboard").iterdir()]
    study.send(("wide vs base", "UNFAIR", None, "torch"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(study.trackers / "tensorboard")).Reload()
    (event,) = events.Tensors("verdicts")
    text = event.tensor_proto.string_val[0].decode()
    assert "UNFAIR" in text and "BETTER" not in text and event.step == 2
    assert json.loads((study.trackers / "facts.json").read_text())["id"] == run_id
    assert study.warnings == []


def test_damaged_state_and_a_failing_tracker_are_a_warning(tmp_path):
    study = Study(tmp_path, TrackerTensorboardOptions())
    study.trackers.mkdir(parents=True)
    (study.trackers / "tensorboard").write_text("in the way")
    study.send(BETTER)
    (study.trackers / "tracker_tensorboard.json").write_text("{}")
    study.send(BETTER)
    lost, damaged = study.warnings
    assert "tracker_tensorboard is lost" in lost and "make verdicts" in lost
    assert "tracker_tensorboard.json" in damaged
    (tmp_path / "file").write_text("")
    study.folder = tmp_path / "file"
    study.send(BETTER)
    assert "Not a directory" in study.warnings[-1]


@pytest.mark.long
def test_trackio_has_every_table_in_one_run(tmp_path, monkeypatch):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    study = Study(tmp_path, TrackerTrackioOptions())
    study.send(BETTER)
    study.send(BETTER, DIVERGED)
    with sqlite3.connect(study.folder / "trackio/kablate-ratio.db") as store:
        rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    tables = [(name, step, json.loads(m)["verdicts"]) for name, step, m in rows if b"_value" in m]
    assert [(name, step) for name, step, _ in tables] == [("verdicts", 1), ("verdicts", 2)]
    assert [row["verdict"] for row in tables[-1][2]["_value"]] == ["BETTER", "DIVERGED 2/5"]
    assert study.warnings == []


@pytest.mark.long
def test_wandb_has_the_words_in_its_summary_online_and_offline(tmp_path, monkeypatch):
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        (tmp_path / "online").mkdir()
        online = Study(tmp_path / "online", TrackerWandbOptions("online", ""), "online")
        online.send(BETTER)
        online.send(DIVERGED)
        (project, _), run = next(iter(server.runs.items()))
        assert (project, run.display_name, len(server.runs)) == ("kablate-ratio", "verdicts", 1)
        summaries = "".join(run.files["wandb-summary.json"].values())
        assert '"verdicts/gate vs base":"DIVERGED 2/5"' in summaries
    offline = Study(tmp_path, TrackerWandbOptions("offline", ""))
    offline.send(BETTER)
    offline.send(DIVERGED)
    (path,) = (offline.trackers / "wandb").glob("offline-run-*")
    (table,) = path.glob("files/media/table/*.json")
    assert json.loads(table.read_text())["data"] == [list(DIVERGED)]
    (name,) = WandbOfflineSource(tmp_path).names("kablate-ratio")
    assert name.name == "verdicts" and online.warnings + offline.warnings == []
