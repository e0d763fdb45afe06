"""A checkpoint resumes only the run that it was made for."""

import json
import shutil
from unittest import mock

import pytest

from gpt2.data.prepare import prepare_dataset
from gpt2.training.resume import run_fingerprint
from lib.errors import RunError
from lib.runs.checkpoint import read_checkpoint, save_checkpoint
from lib.runs.run_dir import RunDir


def brought_elsewhere(run: RunDir) -> RunDir:
    """Copy the files needed to resume another run from the checkpoints of ``run``."""
    elsewhere = RunDir(run.path.with_name("elsewhere"))
    shutil.copytree(run.checkpoints, elsewhere.checkpoints)
    shutil.copy(run.metrics, elsewhere.metrics)
    shutil.copy(run.timing, elsewhere.timing)
    return elsewhere


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"N_EMBD": 24}, "config.model.shape.n_embd (was 16, is 24)"),
        ({"LEARNING_RATE": "2e-2"}, "config.schedule.learning_rate (was 0.01, is 0.02)"),
        ({"SEED": 7}, "config.seed (was 1, is 7)"),
    ],
)
def test_another_configuration_is_rejected_by_name(configure, train, stopped_at, changes, named):
    elsewhere = brought_elsewhere(stopped_at(5).files)
    before = elsewhere.metrics.read_bytes()
    for allow_stale in (False, True):
        with pytest.raises(RunError) as refusal:
            train(configure(**changes), "elsewhere", allow_stale=allow_stale)
        assert refusal.value.codes == ["checkpoint.mismatch"] and "step 5 " in str(refusal.value)
        assert named in str(refusal.value) and "make rerun RUNS=elsewhere" in str(refusal.value)
    assert elsewhere.metrics.read_bytes() == before


def test_edited_text_is_rejected(configure, train, stopped_at, build_dir):
    """Neither configuration nor run directory contains the text."""
    stopped = stopped_at(5)
    added = build_dir / "texts" / "added.txt"
    added.write_text("One more document. " * 9)
    try:
        prepare_dataset(configure().data, build_dir)
        with pytest.raises(RunError, match=r" data \(was [0-9a-f]{64}, is [0-9a-f]") as refusal:
            train(configure())
        assert refusal.value.codes == ["checkpoint.mismatch"]
    finally:
        added.unlink()
    assert train(configure()).status.iteration == 12 and stopped.status.iteration == 5


def test_another_tokenizer_is_rejected(configure, train):
    record = run_fingerprint

    def other(session: object) -> dict:
        found = record(session)
        found["config"]["data"]["tokenizer"] = "gpt2"
        return found

    with mock.patch("gpt2.training.loop.run_fingerprint", other):
        train(configure(), stop_at=5)
    with pytest.raises(RunError, match=r"config.data.tokenizer \(was gpt2, is byte\)") as refusal:
        train(configure())
    assert refusal.value.codes == ["checkpoint.mismatch"]


def test_another_division_of_the_batch_resumes_and_is_recorded(configure, train, stopped_at):
    begun = stopped_at(5).files
    fallback = {
        "action": "micro-batch",
        "iteration": 2,
        "to": {"micro_batch": 1, "accumulation": 4},
    }
    saved = read_checkpoint(begun.checkpoint(5))
    saved.state["session"]["oom_fallbacks"] = [fallback]
    save_checkpoint(begun.checkpoints, 5, saved.weights, saved.state, keep=1)
    brought_elsewhere(begun)
    whole = configure(BATCH_SIZE=4, GRAD_ACCUMULATION=1)
    moved = train(whole, "elsewhere", stop_at=8)
    assert "WARN another division from step 5 on: " in moved.lines()
    done = train(whole, "elsewhere")
    assert done.status.iteration == 12
    manifest = json.loads(done.files.manifest.read_text())
    (earlier,) = manifest["earlier_divisions"]
    assert (earlier["iterations"], earlier["batch_size"]) == (5, 2)
    # The micro-batch of the first division does not fit the second.
    assert earlier["oom_fallbacks"] == [fallback] and manifest["oom_fallbacks"] == []
    assert manifest["batch"]["micro_batch"] == 4
