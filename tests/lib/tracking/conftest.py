"""A fabricated run on two GPUs, in its directory and mirrored to W&B offline files and trackio."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lib.files import canonical_json
from lib.runs.run_dir import RunDir
from lib.tracking.tracker import TrackerMetadata
from tests.lib.fabricated import complete
from tests.loopback.wandb_server import WandbServer, serving

ITERATIONS = 6
PROJECT = "kablate-single"
KEY = "k" * 40


def record_run(path: Path, **settings: Any) -> RunDir:
    """Write the records of a finished training: rows, timings, samples, facts and status."""
    run = RunDir(path)
    run.trackers.mkdir(parents=True)
    rows = [
        {"kind": "train", "loss": 4.0 / i, "lr": 1e-3 / 3, "grad_norm": 0.1 * i}
        | {"iteration": i, "tokens": 8 * i}
        for i in range(1, ITERATIONS + 1)
    ]
    last = {"iteration": ITERATIONS, "tokens": 8 * ITERATIONS}
    rows.append({"kind": "eval", **last, "val_loss": 1.25, "sparsity": 0.0})
    speed = settings.get("speed", 1000.0)
    timings = [
        {"iteration": i, "tokens_per_second": speed + i, "written_at": 100.0 + i} for i in (2, 4, 6)
    ]
    for path, records in (
        (run.metrics, rows),
        (run.timing, timings),
        (run.telemetry, [_sample(101.0 + i, 10.0 * i) for i in range(6)]),
    ):
        path.write_text("".join(canonical_json(record) + "\n" for record in records))
    compiled = settings.get("compile_model", False)
    TrackerMetadata(
        id=run.path.name[-16:].replace("-", "x"),
        project=PROJECT,
        name=run.path.name,
        study="single",
        step=settings.get("step", "run"),
        settings={"seed": 1, "compile_model": compiled, "git_commit": "c0ffee"},
        symbols={
            "TRACKER_WANDB": True,
            "TRACKER_WANDB_MODE": "offline",
            "TRACKER_WANDB_ENTITY": "",
            "TRACKER_TRACKIO": True,
            **settings.get("symbols", {}),
        },
    ).write(run.tracker_facts)
    complete(run, iterations=ITERATIONS)
    return run


def _sample(ts: float, busy: float) -> dict[str, Any]:
    gpus = [
        {
            "index": index,
            "compute_util": busy + index,
            "memory_used_mib": 1024.0 * (index + 1),
            "memory_total_mib": 24576.0,
            "power_watts": 200.0 + busy,
            "temperature_celsius": None if index else 60.0,
        }
        for index in range(2)
    ]
    return {"ts": ts, "rss_mib": 2000.0, "cpu_seconds": ts, "gpus": gpus}


# Importing wandb takes seconds, so one process runs several scripts.
_EACH = """
import runpy, sys
sys.path.insert(0, "scripts")
split = sys.argv.index("--")
scripts, options = sys.argv[1:split], sys.argv[split + 1 :]
for script in scripts:
    print(end=chr(0))
    sys.argv = [script, *options]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
"""


@dataclass
class Kept:
    """One run in four stores."""

    name: str
    local: Path
    offline: Path
    trackio: Path
    server: WandbServer

    def ask(self, script: str, source: str, *more: str) -> subprocess.CompletedProcess:
        """Run a query script like a user; only the selected source is reachable."""
        return self._run([f"scripts/{script}.py"], source, more)

    def ask_all(self, scripts: Sequence[str], source: str) -> list[dict]:
        """Return the JSON document of each query script, from one process."""
        each = [f"scripts/{script}.py" for script in scripts]
        done = self._run(["-c", _EACH, *each, "--"], source, ("--run-name", self.name, "--json"))
        assert done.returncode == 0, done.stderr
        return [json.loads(text) for text in done.stdout.split("\0")[1:]]

    def _run(
        self, program: Sequence[str], source: str, more: Sequence[str]
    ) -> subprocess.CompletedProcess:
        folder = {"local": self.local, "offline": self.offline, "trackio": self.trackio}
        location = ["--folder", str(folder[source])] if source in folder else []
        command = [sys.executable, *program, "--source", source, *location]
        command += ["--project", PROJECT, *more]
        environment = {**os.environ, "WANDB_BASE_URL": self.server.url, "WANDB_API_KEY": KEY}
        return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="package")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Write the run directory and mirror it to each store, in separate folders."""
    folder = tmp_path_factory.mktemp("kept")
    run = record_run(folder / "results/single/run-s1-0123abcd")
    offline = folder / "offline"
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    for tracker in ("tracker_wandb", "tracker_trackio"):
        command = [sys.executable, "-P", "-m", "lib.tracking.mirror", str(run.path), tracker]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True, env=environment)
    (run.trackers / "wandb").rename(offline)
    with serving() as server:
        (path,) = offline.glob("offline-run-*")
        sync = [sys.executable, "-P", "-m", "wandb", "sync", "-p", PROJECT, str(path)]
        access = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
        subprocess.run(
            sync, check=True, capture_output=True, env={**os.environ, **access}, cwd=folder
        )
        yield Kept(run.path.name, folder / "results", offline, folder / "trackio", server)
