"""Queries return the same answer from the run directory and from a server."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lib.errors import ConfigError, PreflightError
from lib.tracking.queries import query_gpu_usage, query_keys
from lib.tracking.sources import RunDirSource, find_run
from tests.errors import error_of
from tests.lib.tracking.conftest import ITERATIONS, record_run

Query = Callable[..., dict[str, Any]]
QUERIES = {
    "inspect_wandb_keys": query_keys,
    "query_wandb_gpu": partial(query_gpu_usage, full=False),
    "query_wandb_gpu_full": partial(query_gpu_usage, full=True),
}


def local(run):
    return ["--source", "local", "--folder", run.path.parents[1], "--run-name", run.path.name]


@pytest.mark.slow
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", QUERIES)
def test_the_server_gives_the_same_answer_as_the_run_directory(tracked, query, name):
    expected = query(QUERIES[name], *local(tracked))
    found = query(QUERIES[name], "--run-name", tracked.path.name)
    # W&B samples the machine by itself while a run is mirrored.
    expected.pop("system", None)
    found.pop("system", None)
    # 0 and 0.0 are equal, and not the same answer.
    assert repr(found) == repr(expected)


def test_the_numbers_are_those_of_the_record(tracked, query):
    keys = query(query_keys, *local(tracked))
    metrics = {m["name"]: (m["count"], m["first"], m["last"]) for m in keys["metrics"]}
    assert metrics["train_loss"] == (ITERATIONS, 4.0, 4.0 / ITERATIONS)
    assert metrics["tokens_per_second"] == (3, 1002.0, 1006.0)
    assert metrics["final/best_val_loss"] == (1, 1.25, 1.25)
    assert metrics["process/cpu_cores"] == (3, 1.0, 1.0)
    assert metrics["process/rss_gb"] == (3, 2000 / 1024, 2000 / 1024)
    assert keys["config"]["git_commit"] == "c0ffee"
    assert len(keys["config"]["manifest_sha256"]) == 64

    use = query(QUERIES["query_wandb_gpu_full"], *local(tracked))
    readings = {reading["name"]: reading for reading in use["readings"]}
    # Samples 0 and 10 %, 20 and 30 %, 40 and 50 %, and the second GPU one more.
    expected = {
        "gpu/compute_util_avg": (25.5, "%"),
        "gpu/1/compute_util": (26.0, "%"),
        "gpu/memory_used_total_gb": (3.0, "GB"),
        "gpu/memory_used_avg_gb": (1.5, "GB"),
        "gpu/memory_total_gb": (48.0, "GB"),
        "gpu/1/memory_used_mib": (2048.0, "MiB"),
        "gpu/1/power_watts": (225.0, "W"),
        "gpu/memory_util_avg": (6.25, "%"),
        "gpu/0/temperature_celsius": (60.0, "°C"),
    }
    for name, (mean, unit) in expected.items():
        assert (readings[name]["mean"], readings[name]["unit"]) == (pytest.approx(mean), unit)
    first = readings["gpu/0/compute_util"]
    assert (first["n"], first["lowest"], first["highest"]) == (3, 5.0, 45.0)
    assert "gpu/1/temperature_celsius" not in readings


def test_tables_are_printed(tracked, monkeypatch, query):
    shown = {}
    for name, make in QUERIES.items():
        monkeypatch.setattr(sys, "argv", ["script", *map(str, local(tracked))])
        shown[name] = [line.split() for line in make("A query.").splitlines()]
    assert ["train_loss", "6", "4", "0.666667"] in shown["inspect_wandb_keys"]
    assert ["git_commit", "c0ffee"] in shown["inspect_wandb_keys"]
    average = ["gpu/compute_util_avg", "25.50", "5.50", "45.50", "%"]
    assert average in shown["query_wandb_gpu"] and average in shown["query_wandb_gpu_full"]
    assert ["gpu/0/power_watts", "225.00", "205.00", "245.00", "W"] in shown["query_wandb_gpu_full"]


@pytest.mark.slow
def test_gpus_of_other_programs_are_read_from_the_system_stream(tracked, query, server):
    (run,) = server.runs.values()
    saved = dict(run.files)
    history = [{k: v for k, v in row.items() if "gpu/" not in k} for row in run.history]
    run.files["wandb-history.jsonl"] = dict(enumerate(map(json.dumps, history)))
    rows = [{"system.gpu.0.gpu": 40.0 + i, "system.gpu.0.unknown": 1.0} for i in (0, 20)]
    run.files["wandb-events.jsonl"] = dict(enumerate(map(json.dumps, rows)))
    try:
        found = query(QUERIES["query_wandb_gpu_full"], "--run-name", tracked.path.name)
    finally:
        run.files = saved
    (reading,) = found["readings"]
    assert (reading["name"], reading["mean"]) == ("gpu/0/compute_util", 50.0)


def refused(query, kind, *arguments):
    with pytest.raises(kind) as caught:
        query(QUERIES["query_wandb_gpu"], *arguments)
    return caught.value


def test_a_name_that_is_no_run_lists_those_that_are(tracked, query, tmp_path):
    folder = tracked.path.parents[1]
    for place, known in ((folder, tracked.path.name), (tmp_path, f"{tmp_path}: ")):
        words = ["--source", "local", "--folder", place, "--run-name", "none"]
        error = refused(query, ConfigError, *words)
        assert error.codes == ["run.not-found"] and known in str(error)


@pytest.mark.parametrize("code", [401, 404])
def test_a_server_that_refuses_is_an_error(server, query, code):
    server.refuse = code
    try:
        error = refused(query, PreflightError, "--run-name", "any")
    finally:
        server.refuse = 0
    assert error.codes == ["tracker.unreachable"]


def test_a_run_without_gpus_or_with_damage_is_an_error(query, tmp_path):
    run = record_run(tmp_path / "single/run-s1-0000cccc")
    run.telemetry.unlink()
    assert refused(query, PreflightError, *local(run)).codes == ["run.missing-metric"]
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join([*lines[:2], '{"kind": "tr\n', *lines[3:]]))
    error = refused(query, PreflightError, *local(run))
    assert error.codes == ["run.damaged"] and error.exit_code == 3
    assert f"{run.metrics}:3: " in str(error)
    assert error.problems[0].next == f"type: make audit RUNS={run.path}"
    run.tracker_facts.write_text("{}")
    error = refused(query, PreflightError, *local(run))
    assert error.codes == ["run.damaged"] and f"{run.tracker_facts}: " in str(error)


def test_a_name_that_two_runs_have_lists_their_ids(tmp_path):
    for hash8 in ("0000aaaa", "0000bbbb"):
        run = record_run(tmp_path / f"single/run-s1-{hash8}")
        facts = json.loads(run.tracker_facts.read_text()) | {"name": "mine"}
        run.tracker_facts.write_text(json.dumps(facts))
    source = RunDirSource(tmp_path)
    error = error_of(find_run, source, "kablate-single", "mine")
    assert error.codes == ["run.ambiguous"]
    ids = [run.id for run in source.names("")]
    assert all(run_id in str(error) for run_id in ids) and ids[0] != ids[1]
    assert find_run(source, "", ids[1]).id == ids[1]
