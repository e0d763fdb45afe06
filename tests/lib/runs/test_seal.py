"""Digests of the manifest, and how a run's end is recorded."""

import json

import pytest

from lib.files import sha256_file
from lib.runs import manifest as manifest_file
from lib.runs.run_dir import RunDir, RunStatus, State, read_status

BEGUN = {
    "status": "RUNNING",
    "failure": None,
    "code": {"git_sha": "abc"},
    "origin": {"sources": {}},
    "artifacts": {},
    "volatile": {"host": "here", "attempts": [{"state": "RUNNING", "started_at": 1.5}]},
}


@pytest.fixture
def run(tmp_path):
    """Return the directory of an active run."""
    run = RunDir(tmp_path)
    manifest_file.write_manifest(run, BEGUN)
    run.metrics.write_text("{}\n")
    run.logs.write_text("TRAIN\n")
    return run


def manifest(run):
    return json.loads(run.manifest.read_text())


def test_the_digest_covers_all_but_what_is_volatile(run):
    written = manifest(run)
    digest, volatile = written["manifest_digest"], written["volatile"]
    for change, same in (
        ({}, True),
        ({"status": "SUCCESS"}, False),
        ({"more": None}, False),
        ({"volatile": {}}, True),
    ):
        assert (manifest_file.manifest_digest(written | change) == digest) is same
    assert manifest_file.volatile_digest(volatile) == volatile["digest"]
    assert manifest_file.volatile_digest(volatile | {"host": "there"}) != volatile["digest"]


def test_success_closes_the_manifest_and_is_written_last(run, monkeypatch):
    write = manifest_file.write_status

    def after_the_manifest(run, status):
        assert manifest(run)["status"] == "SUCCESS"
        write(run, status)

    monkeypatch.setattr(manifest_file, "write_status", after_the_manifest)
    final = RunStatus(State.SUCCESS, iteration=9)
    manifest_file.finalize_run(run, final, {"final_weights_digest": "w"})
    closed = manifest(run)
    assert (closed["failure"], closed["final_weights_digest"]) == (None, "w")
    digest = {"bytes": 3, "sha256": sha256_file(run.metrics)}
    assert closed["artifacts"] == {"metrics.jsonl": digest}
    assert closed["volatile"]["artifacts"].keys() == {"logs.txt"}
    (attempt,) = closed["volatile"]["attempts"]
    assert (attempt["state"], attempt["iteration"]) == ("SUCCESS", 9)
    assert attempt["ended_at"] > attempt["started_at"]
    assert manifest_file.manifest_digest(closed) == closed["manifest_digest"]
    assert read_status(run).state is State.SUCCESS


def test_a_full_disk_does_not_hide_the_failure(run, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    manifest_file.finalize_run(run, RunStatus(State.FAILED, 1, "the loss is nan"))
    assert (manifest(run)["status"], manifest(run)["failure"]) == ("FAILED", "the loss is nan")
    monkeypatch.setattr(manifest_file, "write_json", full)
    manifest_file.finalize_run(run, RunStatus(State.FAILED, 1, "cannot write"))
    status = read_status(run)
    assert status.message == "cannot write" and manifest(run)["failure"] == "the loss is nan"
    with pytest.raises(OSError, match="No space"):
        manifest_file.finalize_run(run, RunStatus(State.SUCCESS))
    assert read_status(run) == status


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"volatile": {"attempts": []}}'])
def test_a_run_that_never_began_gets_a_status_alone(run, content):
    run.manifest.unlink()
    if content is not None:
        run.manifest.write_text(content)
    manifest_file.finalize_run(run, RunStatus(State.FAILED, 3, "no data"))
    assert read_status(run).state is State.FAILED
    assert (run.manifest.read_text() if run.manifest.exists() else None) == content
