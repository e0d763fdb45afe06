"""The real W&B client with a server that disconnects or rejects: the run is not affected."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gpt2.training.loop import optimizer_step
from lib.files import sha256_file
from lib.runs.run_dir import State
from lib.tracking import sidecar
from tests.loopback.wandb_server import WandbServer, serving

ITERATIONS = [*range(1, 13)]


@pytest.fixture
def online(monkeypatch) -> Iterator[tuple[WandbServer, ExitStack]]:
    """A fake W&B server, and the stack that shuts it down."""
    with ExitStack() as up:
        server = up.enter_context(serving())
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        yield server, up


def the_warning(done: Any) -> str:
    """Return the single warning about a lost tracker."""
    (line,) = [line for line in done.lines().splitlines() if line.startswith("WARN")]
    assert line.startswith("WARN tracker_wandb is lost: ")
    assert str(done.files.metrics) in line
    return line


# With a client in place of W&B's: test_a_failing_tracker_costs_one_warning.
@pytest.mark.long
def test_a_server_shut_down_during_the_run(configure, train, uninterrupted, online, monkeypatch):
    server, up = online
    steps = iter(range(len(ITERATIONS)))

    def step(*arguments: Any) -> Any:
        if next(steps) == 7:
            deadline = time.monotonic() + 60
            while "CreateRunFiles" not in server.operations:
                assert time.monotonic() < deadline, server.operations
                time.sleep(0.05)
            up.close()
        return optimizer_step(*arguments)

    # The client would retry for 30 seconds.
    monkeypatch.setattr(sidecar, "_PATIENCE_SECONDS", 2.0)
    with monkeypatch.context() as patch:
        patch.setattr("gpt2.training.loop.optimizer_step", step)
        done = train(configure(TRACKER_WANDB=True))
    assert (done.status.state, done.status.exit_code) == (State.SUCCESS, 0)
    assert done.core() == uninterrupted
    line = the_warning(done)
    assert "30 s after the end" in line

    # The client received all rows but could not send them, so the server lacks the last ones.
    (run,) = server.runs.values()
    assert not run.finished and len(run.history) < len(ITERATIONS)
    with serving(server) as back:
        environment = {**os.environ, "WANDB_BASE_URL": back.url}
        subprocess.run(line.partition("type: ")[2], shell=True, check=True, env=environment)
    assert run.finished
    assert [row["_step"] for row in run.history if "train_loss" in row] == ITERATIONS
    assert [row["train_loss"] for row in run.history] == [r["loss"] for r in done.rows("train")]
    assert run.config["manifest_sha256"]["value"] == sha256_file(done.files.manifest)
