"""Trackers mirror the records; their failures do not affect a run."""

import json
import math
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpt2.running.preflight import TrainingPlace, check_machine
from gpt2.training.loop import optimizer_step
from gpt2.training.sidecars import start_sidecars
from gpt2.training.state import TrainingSession
from lib.env.process_group import ProcessGroup
from lib.env.ranks import ProcessRank
from lib.errors import PreflightError
from lib.files import sha256_file
from lib.runs.run_dir import RunDir, State
from lib.tracking import options as tracking_options
from lib.tracking import sidecar
from lib.tracking.options import TrackerWandbOptions
from lib.tracking.trackers import TrackerWandb, has_end
from tests.json_rows import read_rows
from tests.loopback.stores import History, trackio_history, wandb_history

WANDB = {"TRACKER_WANDB": True}
TENSORBOARD = {"TRACKER_TENSORBOARD": True}
ALL = {**WANDB, **TENSORBOARD, "TRACKER_WANDB_MODE_OFFLINE": True, "TRACKER_TRACKIO": True}
# As long as a real key.
SECRET = "5ec7e7" * 7
KEYS = {
    *("run_name", "batch_size", "gradient_accumulation", "num_gpus", "learning_rate", "seed"),
    *("warmup_steps", "max_time", "compile_model", "git_commit", "dataset", "optimizer"),
}

# Fake wandb package: records calls and fails on request.
FAKE_WANDB = """
import json, os, signal, time

def tell(kind, **facts):
    with open(os.environ["FAKE_LOG"], "a") as stream:
        stream.write(json.dumps({"kind": kind, "pid": os.getpid(), **facts}) + "\\n")
    trouble = os.environ.get("FAKE_TROUBLE", "").split()
    if trouble[:1] == [kind]:
        if trouble[1] == "raise":
            raise RuntimeError("the fake has failed")
        if trouble[1] == "exit":
            os._exit(3)
        if trouble[1] == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

class errors:
    Error = ()

class Settings:
    def __init__(self, **given):
        pass

class Run:
    config = {}
    def log(self, metrics, step):
        tell("log", step=step, metrics=metrics)
    def finish(self, exit_code):
        tell("finish", exit_code=exit_code, config=self.config)

class Config(dict):
    def update(self, found, allow_val_change):
        super().update(found)

def told_steps():
    if not os.path.exists(os.environ["FAKE_LOG"]):
        return [0]
    with open(os.environ["FAKE_LOG"]) as stream:
        return [0, *(row["step"] for row in map(json.loads, stream) if row["kind"] == "log")]

def init(**given):
    run = Run()
    run.starting_step = max(told_steps()) + 1
    run.config = Config(given["config"])
    del given["settings"]
    tell("init", **{k: v if k == "config" else str(v) for k, v in given.items()})
    return run
"""


@dataclass
class Fake:
    """Fake wandb in the mirror's process, and its log."""

    log: Path

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Return the calls of one kind."""
        return [row for row in read_rows(self.log) if row["kind"] == kind]

    def steps(self) -> list[int]:
        """Return the iterations with a logged training loss."""
        return [row["step"] for row in self.told("log") if "train_loss" in row["metrics"]]


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Fake:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "fake.jsonl"))
    return Fake(tmp_path / "fake.jsonl")


def expected_history(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Metric → iteration → value, from the lines of metrics.jsonl."""
    train = {r["iteration"]: r for r in rows if r["kind"] == "train"}
    evals = {r["iteration"]: r for r in rows if r["kind"] == "eval"}
    best = min(r["val_loss"] for r in evals.values())
    last = max(train)
    (told,) = (r for r in rows if r["kind"] == "statistics")
    entropies = told["values"]["attention/entropy"]
    return {
        "attention/entropy": {last: sum(entropies) / 2},
        **{f"layer/{i}/attention/entropy": {last: found} for i, found in enumerate(entropies)},
        "iteration": {i: i for i in train},
        "train_loss": {i: r["loss"] for i, r in train.items()},
        "train_perplexity": {i: math.exp(r["loss"]) for i, r in train.items()},
        "learning_rate": {i: r["lr"] for i, r in train.items()},
        "grad_norm": {i: r["grad_norm"] for i, r in train.items()},
        "val_loss": {i: r["val_loss"] for i, r in evals.items()},
        "val_perplexity": {i: math.exp(r["val_loss"]) for i, r in evals.items()},
        "sparsity": {i: r["sparsity"] for i, r in evals.items()},
        "final/best_val_loss": {last: best},
        "final/best_val_perplexity": {last: math.exp(best)},
    }


def tensorboard_history(run: RunDir) -> History:
    """Return history and configuration from event files, which store fp32 values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.trackers / "tensorboard")).Reload()
    scalars = {
        name: {event.step: event.value for event in found.Scalars(name)}
        for name in found.Tags()["scalars"]
    }
    assert len(found.Scalars("train_loss")) == len(scalars["train_loss"])
    return scalars, json.loads(found.Tensors("config")[0].tensor_proto.string_val[0])


def test_three_trackers_do_not_change_the_run(
    configure, train, uninterrupted, tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    config = configure(**ALL)
    assert config.hash8 == configure().hash8
    done = train(config)
    assert done.core() == uninterrupted
    assert "WARN" not in done.lines()

    expected = expected_history([*read_rows(done.files.metrics)])
    for read in (wandb_history, trackio_history, tensorboard_history):
        history, shown = read(done.files)
        speeds = history.pop("tokens_per_second")
        assert [*speeds] == [3, 6, 9, 12] and min(speeds.values()) > 0
        history = {name: history[name] for name in history if name != "manifest_sha256"}
        assert history.keys() == expected.keys(), read
        for name, values in expected.items():
            assert history[name] == pytest.approx(values, rel=1e-6), (read, name)
        assert shown.keys() >= KEYS, read
        wanted = {"batch_size": 2, "gradient_accumulation": 2, "num_gpus": 1, "warmup_steps": 2}
        wanted |= {"optimizer": "adamwspam", "seed": 1, "N_EMBD": 16, "step": "run"}
        assert {name: shown[name] for name in wanted} == wanted, read

    assert (tmp_path / "run/trackers/wandb").is_dir()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []

    # A cut file of W&B counts as lost, and so does that of a process that has died.
    (file,) = tmp_path.glob("run/trackers/wandb/offline-run-*/*.wandb")
    file.write_bytes(file.read_bytes()[:-1])
    assert not has_end(str(file.parent))
    assert TrackerWandb(TrackerWandbOptions("offline", ""), done.files).stored(3) == 0


CAUSES = {
    "init raise": "RuntimeError: the fake has failed",
    "log exit": "exit code 3",
    "log die": "SIGSEGV",
    "finish raise": "RuntimeError: the fake has failed",
    "finish hang": "30 s after the end",
}


@pytest.mark.parametrize("trouble", CAUSES)
def test_a_failing_tracker_costs_one_warning(
    configure, train, uninterrupted, fake, monkeypatch, trouble
):
    others = TENSORBOARD if trouble == "log exit" else {}
    with monkeypatch.context() as patch:
        patch.setenv("FAKE_TROUBLE", trouble)
        patch.setattr(sidecar, "_PATIENCE_SECONDS", 2.0 if "hang" in trouble else 30.0)
        done = train(configure(**WANDB, **others))
    assert (done.status.state, done.status.exit_code) == (State.SUCCESS, 0)
    assert done.core() == uninterrupted
    (line,) = [line for line in done.lines().splitlines() if line.startswith("WARN")]
    assert "tracker_wandb is lost: " in line and CAUSES[trouble] in line
    assert str(done.files.metrics) in line
    if others:
        # The other tracker receives everything.
        assert tensorboard_history(done.files)[0]["final/best_val_loss"]
    if trouble not in ("init raise", "finish raise"):
        return
    assert fake.steps() == ([] if trouble == "init raise" else [*range(1, 13)])
    # What is missing can be sent later; the second time nothing is left to send.
    for _ in range(1 if trouble == "init raise" else 2):
        subprocess.run(line.partition("type: ")[2], shell=True, check=True)
        assert fake.steps() == [*range(1, 13)]
        assert len(fake.told("init")) == 2


def test_a_lost_tracker_is_reported_during_the_run(configure, train, fake, monkeypatch):
    monkeypatch.setenv("FAKE_TROUBLE", "init raise")
    slow = sidecar.Sidecars.check

    def check(self: sidecar.Sidecars) -> None:
        for mirror in self._running:
            mirror.process.wait(30)
        slow(self)

    monkeypatch.setattr(sidecar.Sidecars, "check", check)
    tags = [line.split()[0] for line in train(configure(**WANDB)).lines().splitlines()]
    assert tags.count("WARN") == 1
    assert tags.index("WARN") < tags.index("DONE")


def test_an_invalid_tracker_folder_costs_one_warning(configure, train, uninterrupted, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers").write_text("in the way")
    done = train(configure(**TENSORBOARD))
    assert done.core() == uninterrupted
    assert done.lines().count("WARN no tracker could be started") == 1


def test_an_interrupted_and_killed_run_continues_in_the_tracker(
    configure, train, uninterrupted, fake
):
    """The tracker received iterations 5 and 6, which are after the newest checkpoint."""
    config = configure(**WANDB, **TENSORBOARD, TRACKER_WANDB_ENTITY="me", TRACKER_RUN_NAME="mine")
    train(config, stop_at=2)
    assert fake.steps() == [1, 2]
    child = os.fork()
    if child == 0:

        def deadly(session: TrainingSession, *rest: Any) -> Any:
            if session.iteration == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return optimizer_step(session, *rest)

        with mock.patch("gpt2.training.loop.optimizer_step", deadly):
            train(config)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    deadline = time.monotonic() + 30
    while len(fake.told("finish")) < 2:
        assert time.monotonic() < deadline, "the tracker did not notice"
        time.sleep(0.05)
    assert fake.steps() == [*range(1, 7)]
    resumed = train(config)
    assert "resumes at iteration 4" in resumed.lines()
    assert resumed.core() == uninterrupted
    assert fake.steps() == [*range(1, 13)]
    inits, ends = fake.told("init"), fake.told("finish")
    assert [end["exit_code"] for end in ends] == [130, 1, 0] and len(inits) == 3
    expected = {"name": "mine", "entity": "me", "mode": "online", "resume": "allow"}
    expected["project"] = f"kablate-{resumed.files.path.parent.name}"
    expected["id"] = json.loads((resumed.files.trackers / "facts.json").read_text())["id"]
    for init in inits:
        assert {name: init[name] for name in expected} == expected and len(init["id"]) == 16
    assert inits[0]["pid"] != os.getpid()
    told, manifest = inits[0]["config"], resumed.manifest()
    assert told["git_commit"] == manifest["code"]["git_sha"]
    assert told["data_digest"] == manifest["data"]["digest"]
    assert told["learning_rate"] == 1e-2
    assert ends[-1]["config"]["manifest_sha256"] == sha256_file(resumed.files.manifest)
    history, _ = tensorboard_history(resumed.files)
    assert history["train_loss"] == pytest.approx(
        {row["iteration"]: row["loss"] for row in resumed.rows("train")}
    )


def test_only_rank_0_has_trackers(session, fake):
    opened = session(**WANDB)
    opened.group = ProcessGroup(ProcessRank(rank=1, local_rank=1, world_size=2))
    with start_sidecars(opened):
        assert not opened.run.trackers.exists()


def test_a_missing_package_is_an_error_before_anything_starts(configure, monkeypatch, tmp_path):
    place = TrainingPlace(tmp_path, tmp_path, dirty=True)
    check_machine([configure(**ALL)], place)
    monkeypatch.setattr(tracking_options, "distributions", lambda name: [])
    check_machine([configure()], place)
    with pytest.raises(PreflightError) as refusal:
        check_machine([configure(**ALL)], place)
    assert refusal.value.codes == ["env.missing-package"] * 3
    assert {problem.next for problem in refusal.value.problems} == {
        *("type: make setup", "type: make setup EXTRAS=trackio"),
        "type: make setup EXTRAS=tensorboard",
    }
    assert refusal.value.exit_code == 3
