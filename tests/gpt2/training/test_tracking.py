"""Trackers mirror the records; their failures do not affect a run."""

import json
import math
import os
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest

from gpt2.running.preflight import TrainingPlace, check_machine
from gpt2.training.sidecars import start_sidecars
from lib.env.process_group import ProcessGroup
from lib.env.ranks import ProcessRank
from lib.errors import PreflightError
from lib.files import sha256_file
from lib.runs.run_dir import State
from lib.tracking import options as tracking_options
from lib.tracking import sidecar
from lib.tracking.options import TrackerWandbOptions
from lib.tracking.trackers import TrackerWandb, has_end
from tests.gpt2.training.conftest import ITERATIONS, at_call
from tests.json_rows import read_rows
from tests.loopback.stores import trackio_history, wandb_history
from tests.loopback.wandb_server import serving

WANDB = {"TRACKER_WANDB": True}
TENSORBOARD = {"TRACKER_TENSORBOARD": True}
ALL = {**WANDB, **TENSORBOARD, "TRACKER_WANDB_MODE_OFFLINE": True, "TRACKER_TRACKIO": True}
EVERY_STEP = [*range(1, ITERATIONS + 1)]
# As long as a real key.
SECRET = "5ec7e7" * 7
SHOWN = {"batch_size": 2, "gradient_accumulation": 2, "num_gpus": 1, "warmup_steps": 2, "seed": 1}
SHOWN |= {"optimizer": "adamwspam", "N_EMBD": 16, "step": "run", "learning_rate": 1e-2}
KEYS = {"run_name", "max_time", "compile_model", "git_commit", "dataset"}

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
    def log(self, metrics, step):
        tell("log", step=step, metrics=metrics)
    def finish(self, exit_code):
        tell("finish", exit_code=exit_code, config=self.config)

class Config(dict):
    def update(self, found, allow_val_change):
        super().update(found)

def init(settings, **given):
    run, steps = Run(), [0]
    if os.path.exists(os.environ["FAKE_LOG"]):
        with open(os.environ["FAKE_LOG"]) as stream:
            steps += [row["step"] for row in map(json.loads, stream) if row["kind"] == "log"]
    run.starting_step = max(steps) + 1
    run.config = Config(given["config"])
    tell("init", **{k: v if k == "config" else str(v) for k, v in given.items()})
    return run
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function from a kind of calls to those of a fake wandb in the mirror's process."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "fake.jsonl"))
    return lambda kind: [r for r in read_rows(tmp_path / "fake.jsonl") if r["kind"] == kind]


def steps(fake):
    """Return the iterations with a logged training loss."""
    return [row["step"] for row in fake("log") if "train_loss" in row["metrics"]]


def expected_history(rows):
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


def tensorboard_history(run):
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
        history.pop("manifest_sha256", None)
        speeds = history.pop("tokens_per_second")
        assert [*speeds] == [3, 6, 9, 12] and min(speeds.values()) > 0
        assert history.keys() == expected.keys(), read
        for name, values in expected.items():
            assert history[name] == pytest.approx(values, rel=1e-6), (read, name)
        assert shown.keys() >= KEYS and shown.items() >= SHOWN.items(), read

    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []

    # A cut file of W&B counts as lost, and so does that of a process that has died.
    (file,) = tmp_path.glob("run/trackers/wandb/offline-run-*/*.wandb")
    file.write_bytes(file.read_bytes()[:-1])
    assert not has_end(str(file.parent))
    assert TrackerWandb(TrackerWandbOptions("offline", ""), done.files).stored(3) == 0


def the_warning(done):
    """Return the single warning about a lost tracker, which affects nothing else."""
    assert (done.status.state, done.status.exit_code) == (State.SUCCESS, 0)
    (line,) = [line for line in done.lines().splitlines() if line.startswith("WARN")]
    assert line.startswith("WARN tracker_wandb is lost: ") and str(done.files.metrics) in line
    return line


def send_the_rest(line):
    subprocess.run(line.partition("type: ")[2], shell=True, check=True)


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
    others, check = TENSORBOARD if trouble == "log exit" else {}, sidecar.Sidecars.check

    def later(self):
        for mirror in self._running if trouble == "init raise" else ():
            mirror.process.wait(30)
        check(self)

    with monkeypatch.context() as patch:
        patch.setenv("FAKE_TROUBLE", trouble)
        patch.setattr(sidecar, "_PATIENCE_SECONDS", 1.0 if "hang" in trouble else 30.0)
        patch.setattr(sidecar.Sidecars, "check", later)
        done = train(configure(**WANDB, **others))
    assert done.core() == uninterrupted
    line = the_warning(done)
    assert CAUSES[trouble] in line
    if others:
        # The other tracker receives everything.
        assert tensorboard_history(done.files)[0]["final/best_val_loss"]
    # What is missing can be sent later; the second time nothing is left to send.
    if trouble == "init raise":
        # Reported as soon as it is noticed.
        assert done.lines().index("WARN") < done.lines().index("DONE") and not steps(fake)
        send_the_rest(line)
    elif trouble == "finish raise":
        assert steps(fake) == EVERY_STEP
        send_the_rest(line)
        send_the_rest(line)
    else:
        return
    assert steps(fake) == EVERY_STEP and len(fake("init")) == 2


# With the real client.
@pytest.mark.long
def test_a_server_shut_down_during_the_run(configure, train, uninterrupted, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    # The client would retry for 30 seconds.
    monkeypatch.setattr(sidecar, "_PATIENCE_SECONDS", 2.0)
    with ExitStack() as up:
        server = up.enter_context(serving())
        monkeypatch.setenv("WANDB_BASE_URL", server.url)

        def shut_down():
            deadline = time.monotonic() + 60
            while "CreateRunFiles" not in server.operations:
                assert time.monotonic() < deadline, server.operations
                time.sleep(0.05)
            up.close()

        with at_call("gpt2.training.loop.optimizer_step", 7, shut_down):
            done = train(configure(**WANDB))
    assert done.core() == uninterrupted
    line = the_warning(done)
    # The client received all rows but could not send them, so the server lacks the last ones.
    (run,) = server.runs.values()
    assert not run.finished and len(run.history) < ITERATIONS
    with serving(server) as back:
        monkeypatch.setenv("WANDB_BASE_URL", back.url)
        send_the_rest(line)
    assert run.finished
    told = {row["_step"]: row["train_loss"] for row in run.history if "train_loss" in row}
    assert told == {row["iteration"]: row["loss"] for row in done.rows("train")}
    assert run.config["manifest_sha256"]["value"] == sha256_file(done.files.manifest)


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
    assert steps(fake) == [1, 2]
    if (child := os.fork()) == 0:
        die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        with at_call("gpt2.training.loop.optimizer_step", 4, die):
            train(config)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    deadline = time.monotonic() + 30
    while len(fake("finish")) < 2:
        assert time.monotonic() < deadline, "the tracker did not notice"
        time.sleep(0.05)
    assert steps(fake) == [*range(1, 7)]
    resumed = train(config)
    assert "resumes at iteration 4" in resumed.lines()
    assert resumed.core() == uninterrupted
    assert steps(fake) == EVERY_STEP
    inits, ends = fake("init"), fake("finish")
    assert [end["exit_code"] for end in ends] == [130, 1, 0] and len(inits) == 3
    expected = {"name": "mine", "entity": "me", "mode": "online", "resume": "allow"}
    expected["project"] = f"kablate-{resumed.files.path.parent.name}"
    expected["id"] = json.loads((resumed.files.trackers / "facts.json").read_text())["id"]
    assert all(init.items() >= expected.items() for init in inits) and len(expected["id"]) == 16
    assert inits[0]["pid"] != os.getpid()
    told, manifest = inits[0]["config"], resumed.manifest()
    assert told["git_commit"] == manifest["code"]["git_sha"]
    assert told["data_digest"] == manifest["data"]["digest"]
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
    assert refusal.value.codes == ["env.missing-package"] * 3 and refusal.value.exit_code == 3
    advice = {problem.next.removeprefix("type: make setup") for problem in refusal.value.problems}
    assert advice == {"", " EXTRAS=trackio", " EXTRAS=tensorboard"}
