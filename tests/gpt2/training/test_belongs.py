"""A checkpoint continues only the run that it was made for."""

from unittest import mock

import pytest

from gpt2.data.prepare import prepare_dataset
from gpt2.training.resume import run_fingerprint
from lib.errors import RunError
from lib.runs.checkpoint import read_checkpoint, save_checkpoint
from tests.gpt2.training.conftest import moved


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"N_EMBD": 24}, "config.model.shape.n_embd (was 16, is 24)"),
        ({"LEARNING_RATE": "2e-2"}, "config.schedule.learning_rate (was 0.01, is 0.02)"),
        ({"SEED": 7}, "config.seed (was 1, is 7)"),
    ],
)
def test_another_configuration_is_rejected_by_name(configure, train, stopped_at, changes, named):
    name = moved(stopped_at(5), "elsewhere")
    before = train.found(name).files.metrics.read_bytes()
    for allow_stale in (False, True):
        with pytest.raises(RunError) as refusal:
            train(configure(**changes), name, allow_stale=allow_stale)
        assert refusal.value.codes == ["checkpoint.mismatch"] and "step 5 " in str(refusal.value)
        assert named in str(refusal.value) and "make rerun RUNS=elsewhere" in str(refusal.value)
    assert train.found(name).files.metrics.read_bytes() == before


def test_edited_text_is_rejected(configure, train, stopped_at, build_dir):
    """Neither configuration nor run directory contains the text."""
    stopped_at(5)
    added = build_dir / "texts" / "added.txt"
    added.write_text("One more document. " * 9)
    try:
        prepare_dataset(configure().data, build_dir)
        with pytest.raises(RunError, match=r" data \(was [0-9a-f]{64}, is [0-9a-f]") as refusal:
            train(configure())
        assert refusal.value.codes == ["checkpoint.mismatch"]
    finally:
        added.unlink()
    assert train(configure()).status.iteration == 12


def test_another_tokenizer_is_rejected(configure, train):
    record = run_fingerprint

    def other(session: object) -> dict:
        found = record(session)
        found["config"]["data"]["tokenizer"] = "gpt2"
        return found

    with mock.patch("gpt2.training.loop.run_fingerprint", other):
        train(configure(), stop_at=2)
    with pytest.raises(RunError, match=r"config.data.tokenizer \(was gpt2, is byte\)") as refusal:
        train(configure())
    assert refusal.value.codes == ["checkpoint.mismatch"]


def test_another_division_of_the_batch_resumes_and_is_recorded(configure, train, stopped_at):
    begun = stopped_at(5)
    fallback = {
        "action": "micro-batch",
        "iteration": 2,
        "to": {"micro_batch": 1, "accumulation": 4},
    }
    saved = read_checkpoint(begun.files.checkpoint(5))
    saved.state["session"]["oom_fallbacks"] = [fallback]
    save_checkpoint(begun.files.checkpoints, 5, saved.weights, saved.state, keep=1)
    whole = configure(BATCH_SIZE=4, GRAD_ACCUMULATION=1)
    half = train(whole, moved(begun, "elsewhere"), stop_at=8)
    assert "WARN another division from step 5 on: " in half.lines()
    done = train(whole, "elsewhere")
    assert done.status.iteration == 12
    manifest = done.manifest()
    (earlier,) = manifest["earlier_divisions"]
    assert (earlier["iterations"], earlier["batch_size"]) == (5, 2)
    # The micro-batch of the first division does not fit the second.
    assert earlier["oom_fallbacks"] == [fallback] and manifest["oom_fallbacks"] == []
    assert manifest["batch"]["micro_batch"] == 4
