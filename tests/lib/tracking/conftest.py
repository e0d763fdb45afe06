"""A fabricated run on two GPUs, in its directory and on a W&B server on loopback."""

import json
import sys

import pytest

from lib.files import canonical_json, sha256_file
from lib.runs.run_dir import RunDir
from lib.tracking.reader import ReadCursor, RecordReader, best_validation_metrics
from lib.tracking.trackers import TrackerMetadata
from tests.lib.fabricated import complete
from tests.loopback.wandb_server import Stored, WandbServer, serving

ITERATIONS = 6
PROJECT = "kablate-single"


def record_run(path, **settings):
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
            "TRACKER_WANDB_MODE": "online",
            "TRACKER_WANDB_ENTITY": "",
            **settings.get("symbols", {}),
        },
    ).write(run.tracker_facts)
    complete(run, iterations=ITERATIONS)
    return run


def _sample(ts, busy):
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


@pytest.fixture(scope="package")
def tracked(tmp_path_factory):
    """Write the run directory."""
    return record_run(tmp_path_factory.mktemp("tracked") / "results/single/run-s1-0123abcd")


@pytest.fixture(scope="package")
def server(tracked):
    """Serve the run as the client of W&B stores it."""
    facts = TrackerMetadata.read(tracked.tracker_facts)
    rows = [*RecordReader(tracked, ReadCursor()).new()]
    rows.append((ITERATIONS, best_validation_metrics(tracked)))
    history = [json.dumps({**row, "_step": step, "_runtime": 0.5}) for step, row in rows]
    config = facts.config | {"manifest_sha256": sha256_file(tracked.manifest), "_wandb": {"t": 1}}
    stored = Stored(facts.project, facts.id, facts.name, number=0, finished=True)
    stored.config = {name: {"value": value} for name, value in config.items()}
    stored.files["wandb-history.jsonl"] = dict(enumerate(history))
    state = WandbServer(runs={(facts.project, facts.id): stored})
    with serving(state) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_BASE_URL", running.url)
        patch.setenv("WANDB_API_KEY", "k" * 40)
        yield running


@pytest.fixture
def query(monkeypatch):
    """Return a function that makes the query of a script, and returns its document."""

    def ask(make, *arguments):
        words = ["script", "--project", PROJECT, "--json", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        return json.loads(make("A query."))

    return ask
