"""Queries return the same answer from every copy of a run, with the other copies out of reach."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.runs.run_dir import RunDir
from lib.tracking.queries import open_source
from lib.tracking.sources import RunDirSource, find_run
from tests.lib.tracking.conftest import ITERATIONS, PROJECT, Kept, record_run

SCRIPTS = ("inspect_wandb_keys", "query_wandb_gpu", "query_wandb_gpu_full")
SOURCES = ("local", "offline", "trackio", "wandb")


@pytest.fixture(scope="module")
def answers(kept: Kept) -> dict[tuple[str, str], dict]:
    """Return (script, source) → document, without fields that only one source has."""
    found = {}
    for source in SOURCES:
        for script, document in zip(SCRIPTS, kept.ask_all(SCRIPTS, source), strict=True):
            # W&B samples the machine by itself while a run is mirrored.
            document.pop("system", None)
            found[script, source] = document
    return found


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("source", SOURCES[1:])
def test_each_copy_gives_the_same_answer_as_the_run_directory(
    answers: dict[tuple[str, str], dict], script: str, source: str
) -> None:
    # 0 and 0.0 are equal, and not the same answer.
    assert repr(answers[script, source]) == repr(answers[script, "local"])


def test_the_numbers_are_those_of_the_record(answers: dict[tuple[str, str], dict]) -> None:
    keys = answers["inspect_wandb_keys", "wandb"]
    metrics = {m["name"]: (m["count"], m["first"], m["last"]) for m in keys["metrics"]}
    assert metrics["train_loss"] == (ITERATIONS, 4.0, 4.0 / ITERATIONS)
    assert metrics["tokens_per_second"] == (3, 1002.0, 1006.0)
    assert metrics["final/best_val_loss"] == (1, 1.25, 1.25)
    assert keys["config"]["git_commit"] == "c0ffee"
    assert len(keys["config"]["manifest_sha256"]) == 64

    use = answers["query_wandb_gpu_full", "offline"]
    means = {reading["name"]: reading["mean"] for reading in use["readings"]}
    # Samples 0 and 10 %, 20 and 30 %, 40 and 50 %, and the second GPU one more.
    assert means["gpu/compute_util_avg"] == pytest.approx(25.5)
    assert means["gpu/1/compute_util"] == pytest.approx(26.0)
    assert means["gpu/memory_used_total_gb"] == pytest.approx(3.0)
    assert means["gpu/memory_util_avg"] == pytest.approx(6.25)
    assert means["gpu/0/temperature_celsius"] == pytest.approx(60.0)
    assert "gpu/1/temperature_celsius" not in means
    assert [remark.split()[:2] for remark in use["remarks"]] == [
        ["LOW", "compute"],
        ["LOW", "memory"],
    ]


def test_a_name_that_is_no_run_lists_those_that_are(kept: Kept) -> None:
    done = kept.ask("query_wandb_gpu", "local", "--run-name", "none")
    assert done.returncode == 2
    assert "[run.not-found]" in done.stderr
    assert "none" in done.stderr and kept.name in done.stderr


def test_a_name_that_two_runs_have_lists_their_ids(tmp_path) -> None:
    for hash8 in ("0000aaaa", "0000bbbb"):
        run = record_run(tmp_path / f"single/run-s1-{hash8}")
        facts = json.loads(run.tracker_facts.read_text()) | {"name": "mine"}
        run.tracker_facts.write_text(json.dumps(facts))
    source = RunDirSource(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_run(source, "kablate-single", "mine")
    assert caught.value.codes == ["run.ambiguous"]
    ids = [run.id for run in source.names("")]
    assert all(run_id in str(caught.value) for run_id in ids) and ids[0] != ids[1]
    assert find_run(source, "", ids[1]).id == ids[1]


@pytest.mark.parametrize("code", [401, 404])
def test_a_server_that_refuses_is_one_line(kept: Kept, code: int) -> None:
    kept.server.refuse = code
    try:
        done = kept.ask("query_wandb_gpu", "wandb", "--run-name", kept.name)
    finally:
        kept.server.refuse = 0
    assert done.returncode == 3
    assert "[tracker.unreachable]" in done.stderr
    assert "Traceback" not in done.stderr


def refused(kept: Kept, source: str, *more: str, code: int = 3) -> str:
    """Return the stderr of a query that fails with ``code`` and exactly one ERROR line."""
    done = kept.ask("inspect_wandb_keys", source, "--run-name", kept.name, *more)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("ERROR ") and done.stderr.count("ERROR ") == 1
    return done.stderr


@pytest.mark.parametrize("source", SOURCES[:3])
def test_a_folder_without_runs_is_named(kept: Kept, source: str, tmp_path: Path) -> None:
    stderr = refused(kept, source, "--folder", str(tmp_path), code=2)
    assert f"{tmp_path}: " in stderr and PROJECT in stderr and "[run.not-found]" in stderr
    assert "--folder DIR, --project NAME" in stderr


def test_a_line_that_is_damaged_is_named(kept: Kept, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "single" / kept.name)
    shutil.copytree(kept.local / "single" / kept.name, copy.path)
    lines = copy.metrics.read_text().splitlines(keepends=True)
    copy.metrics.write_text("".join([*lines[:2], '{"kind": "tr\n', *lines[3:]]))
    stderr = refused(kept, "local", "--folder", str(tmp_path))
    assert f"{copy.metrics}:3: " in stderr
    assert "[run.damaged]" in stderr and f"make audit RUNS={copy.path}" in stderr
    copy.tracker_facts.write_text("{}")
    assert f"{copy.tracker_facts}: " in refused(kept, "local", "--folder", str(tmp_path))


def test_rows_that_are_damaged_are_not_left_out(kept: Kept, tmp_path: Path) -> None:
    # wandb's reader skips damaged rows and continues.
    shutil.copytree(kept.offline, tmp_path / "offline", symlinks=True)
    (path,) = tmp_path.glob("offline/offline-run-*/*.wandb")
    data = bytearray(path.read_bytes())
    # Inside a record: a damaged header may look like the end of the file.
    data[data.rindex(b"train_loss")] ^= 1
    path.write_bytes(data)
    stderr = refused(kept, "offline", "--folder", str(tmp_path))
    assert f"{path}: " in stderr and "[tracker.damaged-store]" in stderr
    assert "--source local" in stderr


def test_trackio_is_read_from_the_folder_that_it_writes_to(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(kept.trackio))
    assert open_source(Namespace(source="trackio", folder=None)).names(PROJECT)
    assert not open_source(Namespace(source="trackio", folder=kept.local)).names(PROJECT)
    monkeypatch.delenv("TRACKIO_DIR")
    assert open_source(Namespace(source="trackio", folder=None), kept.trackio).names(PROJECT)


def test_a_run_without_gpus_is_an_error(tmp_path, kept: Kept) -> None:
    run = record_run(tmp_path / "single/run-s1-0000cccc")
    run.telemetry.unlink()
    command = ["--run-name", run.path.name, "--folder", str(tmp_path)]
    done = kept.ask("query_wandb_gpu", "local", *command)
    assert done.returncode == 3
    assert "[run.missing-metric]" in done.stderr
