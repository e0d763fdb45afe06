"""Non-finite steps: the run fails, the tensor is identified, and the step can be replayed."""

import json
import math
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import Tensor

from gpt2.model import GPT
from gpt2.training.loop import optimizer_step
from gpt2.training.nonfinite import COLUMNS
from gpt2.training.state import StepMetrics, TrainingSession
from lib.files import sha256_file
from lib.runs.run_dir import State, read_status
from tests.gpt2.training.conftest import SPLITS

CULPRIT = "h.1.mlp.c_proj.weight"
OFF = {"CHECK_NUMERICS": False}


@contextmanager
def bad_gradient(
    iteration: int, value: float, rank: int = 0, where: Any = (1, 5)
) -> Iterator[None]:
    """Set one gradient to ``value`` at ``where`` on ``rank`` in the step ``iteration``."""

    def spoiled(session: TrainingSession, *rest: Any) -> StepMetrics:
        parameter = dict(session.model.named_parameters())[CULPRIT]

        def spoil(gradient: Tensor) -> Tensor:
            found = gradient.clone()
            found[where] = value
            return found

        bad = session.iteration + 1 == iteration and session.group.rank == rank
        handle = parameter.register_hook(spoil) if bad else None
        try:
            return optimizer_step(session, *rest)
        finally:
            if handle:
                handle.remove()

    with mock.patch("gpt2.training.loop.optimizer_step", spoiled):
        yield


def strict(text: str) -> dict[str, Any]:
    """Parse strict JSON, without NaN."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def strictly(path: Path) -> dict[str, Any]:
    return strict(path.read_text())


@pytest.mark.parametrize(("value", "nan"), [(math.nan, 1), (-math.inf, 0)])
def test_one_bad_element_is_located_and_the_step_can_be_replayed(
    configure, train, uninterrupted, value, nan
):
    config = configure()
    assert config.train.grad_clip > 0
    with bad_gradient(7, value):
        failed = train(config)
    assert (failed.status.state, failed.status.exit_code) == (State.FAILED, 1)
    expected = f"gradient norm is (NaN|infinite) at it 7, .*gradient of {CULPRIT}"
    assert re.fullmatch(expected, read_status(failed.files).message)
    assert not failed.files.weights.exists() and not failed.files.summary.exists()

    record = strictly(failed.files.numerics_failure)
    (row,) = record["tensors"]
    counts = {"nonfinite": 1, "nan": nan, "inf": 1 - nan, "first_bad_index": 64 + 5}
    tensor = {"shape": [16, 64], "dtype": "float32", "device": "cpu"}
    assert row == {"param": CULPRIT, "holds": "gradient", **tensor, **counts}
    shown = [line for line in failed.lines().splitlines() if line.startswith("FAIL")]
    assert shown[0].split()[1:] == [*COLUMNS] and CULPRIT in shown[1]
    assert CULPRIT in failed.files.logs.read_text()
    documents = [path for path in failed.files.path.iterdir() if path.suffix in (".json", ".yaml")]
    assert {"manifest.json", "status.json", "resolved_config.yaml"} <= {p.name for p in documents}
    assert all(map(strictly, documents))
    assert strictly(failed.files.manifest)["status"] == "FAILED"
    for path in failed.files.path.glob("*.jsonl"):
        assert all(strict(line) for line in path.read_text().splitlines())
    assert (record["iteration"], record["sequences"]) == (7, {"first": 24, "count": 4})
    assert record["lr"] > 0 and record["found"] == "before the update"
    assert [r["micro_batch"] for r in record["ranks"]] == [0]

    # Replay: the checkpoint is the start of the step.
    assert record["checkpoint"] == 6
    if math.isinf(value):
        return
    with bad_gradient(7, value):
        again = train(config)
    assert "resumes at iteration 6" in again.lines()
    assert strictly(again.files.numerics_failure) == record
    # Without the fault the results are unaffected, except for the archived record.
    done = train(config)
    assert done.core() == uninterrupted
    assert not done.files.numerics_failure.exists() and not done.files.numerics_batch.exists()
    assert strictly(done.files.overcome / "numerics_failure.json") == record
    kept = done.files.overcome / "numerics_failure.safetensors"
    assert sha256_file(kept) == record["batch"]["sha256"]
    assert re.search(f"^WARN .*: {done.files.overcome}$", done.lines(), re.MULTILINE)


def test_the_batch_and_the_generator_states_are_saved(configure, train, session):
    with bad_gradient(1, math.nan):
        failed = train(configure())
    record = strictly(failed.files.numerics_failure)
    kept = safetensors.torch.load_file(failed.files.numerics_batch)
    opened = session()
    first, second = next(opened.batches())
    assert torch.equal(kept["x"], torch.stack([first[0], second[0]])[None])
    assert torch.equal(kept["y"], torch.stack([first[1], second[1]])[None])
    assert torch.equal(kept["rng.torch"][0], torch.get_rng_state())
    # The losses of the record are reproducible from the batch and generator states alone.
    torch.set_rng_state(kept["rng.torch"][0])
    with torch.no_grad():
        loss = opened.model(kept["x"][0, 0], kept["y"][0, 0])
    assert record["ranks"][0]["losses"] == [loss.item()]


def test_an_overflowing_norm_is_distinguished_from_infinite_elements(configure, train):
    """2e38, the sum of both micro-batches, is finite in fp32; 32 times that is not."""
    with bad_gradient(3, 1e38, where=...):
        failed = train(configure())
    assert failed.status.message.startswith("gradient norm is infinite at it 3, ")
    assert f"{CULPRIT} overflows" in failed.status.message
    (row,) = strictly(failed.files.numerics_failure)["tensors"]
    assert (row["param"], row["nonfinite"], row["first_bad_index"]) == (CULPRIT, 0, None)


@contextmanager
def bad_output(iteration: int, rank: int = 0) -> Iterator[None]:
    """Spoil the outputs of ``c_proj`` of each MLP on ``rank`` in the step ``iteration``."""
    forward, bad = torch.nn.Linear.forward, [False]

    def spoiled(linear: torch.nn.Linear, x: Tensor) -> Tensor:
        return forward(linear, x) * (math.nan if bad[0] and linear.in_features == 64 else 1.0)

    def marked(session: TrainingSession, *rest: Any) -> StepMetrics:
        bad[0] = session.iteration + 1 == iteration and session.group.rank == rank
        return optimizer_step(session, *rest)

    with (
        mock.patch("torch.nn.Linear.forward", spoiled),
        mock.patch("gpt2.training.loop.optimizer_step", marked),
    ):
        yield


def test_a_bad_output_is_traced_to_its_module(configure, train):
    with bad_output(5):
        failed = train(configure())
    assert failed.status.message.startswith("loss is NaN at it 5, ")
    assert failed.status.message.endswith(" h.0.mlp.c_proj")
    record = strictly(failed.files.numerics_failure)
    assert record["loss"] == "NaN" and record["ranks"][0]["losses"] == ["NaN"]


@pytest.mark.slow
def test_a_bad_output_on_one_rank_of_a_sharded_model_is_located(configure, together):
    with bad_output(2, rank=1):
        failed, (_, other) = together(configure(**SPLITS[2], DATA_PARALLEL_FSDP=True))
    assert re.fullmatch(r"loss is NaN \(rank 1\) at it 2, .* h.0.mlp.c_proj", failed.status.message)
    assert other == f"RunError: {failed.status.message} [numerics.non-finite]"


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({**OFF, "LOG_INTERVAL": 5, "CHECKPOINT_INTERVAL": 0}, math.inf),
        # Between two checks; the checkpoint of the fourth iteration is due.
        ({"CHECK_NUMERICS_EVERY": 9, "LOG_INTERVAL": 100}, math.nan),
    ],
)
def test_a_step_that_is_not_checked_fails_the_run_later(configure, train, changes, value):
    with bad_gradient(4, value):
        failed = train(configure(EVAL_INTERVAL=0, **changes))
    assert (failed.status.state, failed.status.exit_code) == (State.FAILED, 1)
    # A pruning mask turns infinity to NaN.
    expected = f"gradient norm is (NaN|infinite) at it 4, first bad tensor gradient of {CULPRIT}"
    assert re.fullmatch(expected, failed.status.message)
    record = strictly(failed.files.numerics_failure)
    assert record["found"] == "after the update" and record["checkpoint"] is None
    (row,) = record["tensors"]
    assert (row["param"], row["nonfinite"]) == (CULPRIT, None)
    assert [r["iteration"] for r in failed.rows("train")] == [1, 2, 3]
    assert not failed.files.weights.exists()
    # Weights damaged by the step are not saved.
    assert list(failed.files.checkpoints.iterdir()) == []


def test_checks_do_not_change_results_and_are_recorded(configure, train, uninterrupted):
    assert uninterrupted["summary"]["numerics"] == {"check_numerics": True, "detect_anomaly": False}
    anomaly = configure(DETECT_ANOMALY=True, **OFF)
    assert anomaly.hash8 == configure().hash8
    done = train(anomaly)
    assert done.summary()["timing"]["debug_flags"] == ["detect_anomaly"]
    flags = {"check_numerics": False, "detect_anomaly": True}
    expected = {**uninterrupted["summary"], "numerics": flags}
    assert done.core() == uninterrupted | {"summary": expected}


@pytest.mark.parametrize("size", [1, 2])
def test_anomaly_detection_names_the_operation_and_the_rank(configure, train, ranks, size):
    def body(rank: int) -> str:
        forward = GPT.forward

        def spoiled(model: GPT, *batch: Tensor) -> Tensor:
            loss = forward(model, *batch)
            # The root's slope at 0 is infinite, and 0 times that is NaN.
            return loss + torch.sqrt(loss * 0.0) if rank == size - 1 else loss

        with mock.patch("gpt2.model.GPT.forward", spoiled), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return str(train(configure(DETECT_ANOMALY=True, **OFF, **SPLITS[size])).status.message)

    *_, message = ranks(size, body)
    error = "anomaly: Function 'MulBackward0' returned nan values"
    assert message.startswith(("", "RunError: ")[size - 1] + error)
    assert ("(rank 1) at it 1" in message) is (size == 2)
    record = strictly(train.found("run").files.numerics_failure)
    assert (record["found"], record["iteration"]) == ("in the backward pass", 1)
    assert record.get("rank") == (None, 1)[size - 1]


def test_a_bad_evaluation_leaves_a_record(configure, train):
    with mock.patch("gpt2.evaluate.EvaluationResult.loss", math.inf):
        failed = train(configure(EVAL_INTERVAL=0, MAX_ITERS=2))
    record = strictly(failed.files.numerics_failure)
    assert (record["found"], record["iteration"]) == ("in an evaluation", 2)


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [({}, True), ({**OFF, "LOG_INTERVAL": 1}, False)],
)
def test_all_ranks_stop_and_the_bad_rank_is_recorded(configure, train, ranks, changes, culprit):
    """A gradient that is bad on rank 1 only is bad on both ranks after the all-reduce."""

    def body(rank: int) -> str:
        with bad_gradient(4, math.nan, rank=1):
            return str(train(configure(**SPLITS[2], **changes)).status.message)

    started = time.monotonic()
    main, other = ranks(2, body)
    assert time.monotonic() - started < 30
    assert main.startswith(f"gradient norm is NaN{' (rank 1)' * culprit} at it 4, ")
    assert main.endswith(f"gradient of {CULPRIT}")
    assert other == f"RunError: {main} [numerics.non-finite]"
    found = train.found("run")
    assert read_status(found.files).state is State.FAILED
    if not culprit:
        return
    record = strictly(found.files.numerics_failure)
    assert [r["micro_batch"] for r in record["ranks"]] == [None, 0]
    (row,) = record["tensors"]
    assert (row["rank"], row["param"], row["nonfinite"]) == (1, CULPRIT, 1)
    kept = safetensors.torch.load_file(found.files.numerics_batch)
    assert not torch.equal(*kept["rng.torch"])
    assert kept["x"].shape == (2, 2, 1, 16)
    # All ranks saved at the same step.
    assert record["checkpoint"] == 3
    assert [p.name for p in found.files.checkpoints.iterdir()] == ["step-00000003"]


def test_a_weight_that_is_bad_on_one_rank_is_named_with_its_rank(configure, train, ranks):
    def body(rank: int) -> str:
        def spoiled(session: TrainingSession, *rest: Any) -> StepMetrics:
            if rank == 1 and session.iteration == 2:
                with torch.no_grad():
                    dict(session.model.named_parameters())[CULPRIT][0, 3] = math.inf
            return optimizer_step(session, *rest)

        with mock.patch("gpt2.training.loop.optimizer_step", spoiled):
            return str(train(configure(**SPLITS[2])).status.message)

    main, _ = ranks(2, body)
    assert main.endswith(f"(rank 1) at it 3, first bad tensor {CULPRIT}")
    (row,) = strictly(train.found("run").files.numerics_failure)["tensors"]
    assert (row["rank"], row["holds"], row["inf"], row["first_bad_index"]) == (1, "weight", 1, 3)
