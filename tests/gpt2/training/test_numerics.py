"""Non-finite steps: the run fails, the tensor is identified, and the step can be replayed."""

import json
import math
import re
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

from gpt2.model import GPT
from gpt2.training.loop import optimizer_step
from gpt2.training.nonfinite import (
    COLUMNS,
    MAX_ROWS_SHOWN,
    bad_modules,
    find_nonfinite,
    format_table,
    json_number,
)
from lib.files import sha256_file
from lib.runs.run_dir import State, read_status
from tests.gpt2.training.conftest import SPLITS

CULPRIT = "h.1.mlp.c_proj.weight"
OFF = {"CHECK_NUMERICS": False}


@contextmanager
def in_step(iteration, around, rank=0):
    """Run the step ``iteration`` on ``rank`` in the context ``around(session)``."""

    def step(session, *rest):
        if session.iteration + 1 != iteration or session.group.rank != rank:
            return optimizer_step(session, *rest)
        with around(session):
            return optimizer_step(session, *rest)

    with mock.patch("gpt2.training.loop.optimizer_step", step):
        yield


def bad_gradient(iteration, value, rank=0, where=(1, 5)):
    """Set one gradient to ``value`` at ``where`` on ``rank`` in the step ``iteration``."""

    def spoil(gradient):
        found = gradient.clone()
        found[where] = value
        return found

    return in_step(
        iteration, lambda session: session.model.get_parameter(CULPRIT).register_hook(spoil), rank
    )


def bad_output(iteration, rank=0):
    """Spoil the outputs of ``c_proj`` of each MLP on ``rank`` in the step ``iteration``."""
    forward = nn.Linear.forward

    def spoiled(linear, x):
        return forward(linear, x) * (math.nan if linear.in_features == 64 else 1.0)

    return in_step(iteration, lambda _: mock.patch("torch.nn.Linear.forward", spoiled), rank)


def strict(text):
    """Parse strict JSON, without NaN."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def failure(trained):
    return strict(trained.files.numerics_failure.read_text())


@pytest.mark.slow
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

    record = failure(failed)
    (row,) = record["tensors"]
    counts = {"nonfinite": 1, "nan": nan, "inf": 1 - nan, "first_bad_index": 64 + 5}
    tensor = {"shape": [16, 64], "dtype": "float32", "device": "cpu"}
    assert row == {"param": CULPRIT, "holds": "gradient", **tensor, **counts}
    shown = [line for line in failed.lines().splitlines() if line.startswith("FAIL")]
    assert shown[0].split()[1:] == [*COLUMNS] and CULPRIT in shown[1]
    assert CULPRIT in failed.files.logs.read_text()
    for path in failed.files.path.iterdir():
        if path.suffix in (".json", ".yaml"):
            strict(path.read_text())
        elif path.suffix == ".jsonl":
            assert all(map(strict, path.read_text().splitlines()))
    assert failed.manifest()["status"] == "FAILED"
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
    assert failure(again) == record
    # Without the fault the results are unaffected, except for the archived record.
    done = train(config)
    assert done.core() == uninterrupted
    assert not done.files.numerics_failure.exists() and not done.files.numerics_batch.exists()
    assert strict((done.files.overcome / "numerics_failure.json").read_text()) == record
    kept = done.files.overcome / "numerics_failure.safetensors"
    assert sha256_file(kept) == record["batch"]["sha256"]
    assert re.search(f"^WARN .*: {done.files.overcome}$", done.lines(), re.MULTILINE)


def test_the_batch_and_the_generator_states_are_saved(configure, train, session):
    """The losses of the record are reproducible from them alone."""
    with bad_gradient(1, math.nan):
        failed = train(configure())
    kept = safetensors.torch.load_file(failed.files.numerics_batch)
    opened = session()
    for name, batches in zip("xy", zip(*next(opened.batches()), strict=True), strict=True):
        assert torch.equal(kept[name], torch.stack(batches)[None])
    assert torch.equal(kept["rng.torch"][0], torch.get_rng_state())
    loss = opened.model(kept["x"][0, 0], kept["y"][0, 0])
    assert failure(failed)["ranks"][0]["losses"] == [loss.item()]


def test_an_overflowing_norm_is_distinguished_from_infinite_elements(configure, train):
    """2e38, the sum of both micro-batches, is finite in fp32; 32 times that is not."""
    with bad_gradient(3, 1e38, where=...):
        failed = train(configure())
    assert failed.status.message.startswith("gradient norm is infinite at it 3, ")
    assert f"{CULPRIT} overflows" in failed.status.message
    (row,) = failure(failed)["tensors"]
    assert (row["param"], row["nonfinite"], row["first_bad_index"]) == (CULPRIT, 0, None)


def test_a_bad_output_is_traced_to_its_module(configure, train):
    with bad_output(5):
        failed = train(configure())
    assert failed.status.message.startswith("loss is NaN at it 5, ")
    assert failed.status.message.endswith(" h.0.mlp.c_proj")
    record = failure(failed)
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
    record = failure(failed)
    assert record["found"] == "after the update" and record["checkpoint"] is None
    (row,) = record["tensors"]
    assert (row["param"], row["nonfinite"]) == (CULPRIT, None)
    assert [r["iteration"] for r in failed.rows("train")] == [1, 2, 3]
    # Weights damaged by the step are not saved.
    assert not failed.files.weights.exists() and not any(failed.files.checkpoints.iterdir())


@pytest.mark.slow
def test_checks_do_not_change_results_and_are_recorded(configure, train, uninterrupted):
    anomaly = configure(DETECT_ANOMALY=True, **OFF)
    assert anomaly.hash8 == configure().hash8
    done = train(anomaly)
    assert done.summary()["timing"]["debug_flags"] == ["detect_anomaly"]
    summary = dict(uninterrupted["summary"])
    assert summary["numerics"] == {"check_numerics": True, "detect_anomaly": False}
    summary["numerics"] = {"check_numerics": False, "detect_anomaly": True}
    assert done.core() == uninterrupted | {"summary": summary}


@pytest.mark.parametrize("size", [1, 2])
def test_anomaly_detection_names_the_operation_and_the_rank(configure, train, ranks, size):
    def body(rank):
        forward = GPT.forward

        def spoiled(model, *batch):
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
    record = failure(train.found("run"))
    assert (record["found"], record["iteration"]) == ("in the backward pass", 1)
    assert record.get("rank") == (None, 1)[size - 1]


def test_a_bad_evaluation_leaves_a_record(configure, train):
    with mock.patch("gpt2.evaluate.EvaluationResult.loss", math.inf):
        failed = train(configure(EVAL_INTERVAL=0, MAX_ITERS=2))
    record = failure(failed)
    assert (record["found"], record["iteration"]) == ("in an evaluation", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "culprit"), [({}, True), ({**OFF, "LOG_INTERVAL": 1}, False)])
def test_all_ranks_stop_and_the_bad_rank_is_recorded(configure, together, changes, culprit):
    """A gradient that is bad on rank 1 only is bad on both ranks after the all-reduce."""
    with bad_gradient(4, math.nan, rank=1):
        found, (_, other) = together(configure(**SPLITS[2], **changes))
    message = found.status.message
    assert message.startswith(f"gradient norm is NaN{' (rank 1)' * culprit} at it 4, ")
    assert message.endswith(f"gradient of {CULPRIT}")
    assert other == f"RunError: {message} [numerics.non-finite]"
    assert found.status.state is State.FAILED
    if not culprit:
        return
    record = failure(found)
    assert [r["micro_batch"] for r in record["ranks"]] == [None, 0]
    (row,) = record["tensors"]
    assert (row["rank"], row["param"], row["nonfinite"]) == (1, CULPRIT, 1)
    kept = safetensors.torch.load_file(found.files.numerics_batch)
    assert not torch.equal(*kept["rng.torch"])
    assert kept["x"].shape == (2, 2, 1, 16)
    # All ranks saved at the same step.
    assert record["checkpoint"] == 3 and found.files.checkpoint_steps == [3]


@pytest.mark.slow
def test_a_weight_that_is_bad_on_one_rank_is_named_with_its_rank(configure, together):
    @contextmanager
    def bad_weight(session):
        session.model.get_parameter(CULPRIT).data[0, 3] = math.inf
        yield

    with in_step(3, bad_weight, rank=1):
        found, _ = together(configure(**SPLITS[2]))
    assert found.status.message.endswith(f"(rank 1) at it 3, first bad tensor {CULPRIT}")
    (row,) = failure(found)["tensors"]
    assert (row["rank"], row["holds"], row["inf"], row["first_bad_index"]) == (1, "weight", 1, 3)


LONG = "h.11.attn.gates.ra_cross_token.a_name_that_goes_on_and_on_without_an_end.weight"


def test_bad_elements_are_counted_in_a_table_with_whole_names():
    bad = torch.zeros(3, 4, dtype=torch.float64)
    bad[1, 2], bad[1, 3], bad[2, 0], bad[2, 3] = math.nan, math.inf, -math.inf, math.nan
    tensor = torch.tensor([math.nan, 1.0])
    tensors = {"good": torch.ones(2), "none": None, LONG: bad, "b": tensor}
    rows = find_nonfinite(tensors, "gradient")
    head, first, second = format_table(rows)
    assert tuple(head.split()) == COLUMNS and rows[0]["first_bad_index"] == 6
    assert first.split() == [LONG, "[3,", "4]", "float64", "cpu", "4", "2", "2"]
    assert second.split() == ["b", "[2]", "float32", "cpu", "1", "1", "0"]
    assert first.index("[3,") == second.index("[2]") == head.index("shape")
    many = find_nonfinite({str(i): tensor for i in range(MAX_ROWS_SHOWN + 3)}, "weight")
    assert format_table(many)[-1] == "and 3 more" and len(format_table(many)) == MAX_ROWS_SHOWN + 2
    assert list(map(json_number, (math.inf, -math.inf, 0.1))) == ["infinity", "-infinity", 0.1]


def test_the_first_bad_module_is_the_innermost_and_a_mask_is_not_bad():
    class Adds(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            return x + self.number

    inner = nn.Sequential(nn.Linear(2, 2), Adds(math.inf), nn.Linear(2, 2))
    for model, expected in (
        (nn.Sequential(nn.Identity(), inner), ["1.1"]),
        (Adds(-math.inf), []),
    ):
        with bad_modules(model) as names:
            model(torch.ones(1, 2))
        assert names == expected
