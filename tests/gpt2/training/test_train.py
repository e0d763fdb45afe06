"""A run from configuration to results, and the invariances of its results."""

from itertools import accumulate, count

import numpy as np
import pytest
import torch

from gpt2.data.sampler import EMPTY_ORDER_DIGEST, extend_order_digest
from gpt2.training.loop import optimizer_step
from gpt2.training.state import DataOrder
from lib.env.process_group import ProcessGroup
from lib.errors import EXIT_TIME_LIMIT
from lib.runs.run_dir import State

RESULTS = ["weights", "per_query", "sample"]
UNOBSERVED = {"LOG_INTERVAL": 5, "EVAL_INTERVAL": 0, "CHECKPOINT_INTERVAL": 0}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({**UNOBSERVED, "WARMUP_ITERATIONS": 3, "GRAD_CHECKPOINTING": True}, RESULTS),
        # Other documents are evaluated.
        ({"LOADER_WORKERS": 1, "PREFETCH_FACTOR": 5, "EVAL_TOKENS": 120}, ["weights"]),
    ],
)
def test_what_does_not_train_changes_no_result(configure, train, trained, changes, same):
    other = train(configure(**changes))
    assert trained.rows("train") == other.rows("train")
    order, its_order = (t.summary()["final"]["data_order_digest"] for t in (trained, other))
    assert order == its_order
    for name in same:
        files = (getattr(done.files, name) for done in (trained, other))
        assert len({file.read_bytes() for file in files}) == 1, name


@pytest.mark.slow
def test_configuration_and_seed_determine_the_bytes(configure, train, trained):
    torch.manual_seed(999)
    again, other = train(configure(), "again"), train(configure(SEED=7), "other")
    assert again.core() == trained.core()
    manifests = [done.manifest() for done in (trained, again, other)]
    assert manifests[0]["volatile"] != manifests[1]["volatile"]
    # The origin lists the modules that are loaded by then; the tree may have been edited.
    facts = manifests[0].keys() - {"volatile", "origin", "code", "manifest_digest"}
    assert all(manifests[0][name] == manifests[1][name] for name in facts)
    assert manifests[0]["init_weights_digest"] != manifests[2]["init_weights_digest"]
    for seed, done in ((1, trained), (7, other)):
        assert done.manifest()["seeds"]["seed"] == done.summary()["seed"] == seed
        assert f"| seed {seed} |" in done.files.logs.read_text()
    orders = [done.summary()["final"]["data_order_digest"] for done in (trained, other)]
    assert orders[0] != orders[1]
    first, second = (done.rows("train")[0] for done in (trained, other))
    assert first["loss"] != second["loss"] and first["grad_norm"] != second["grad_norm"]


def test_bf16_gradients_are_those_of_each_micro_batch_by_itself(session):
    """Weights are cast once for all micro-batches, with the bits of casting them each time."""
    plain = {"DROPOUT": "0.0", "GRAD_CLIP": "0", "PRUNING_MAGNITUDE": None}
    opened = session(PRECISION_BF16=True, PRECISION_WHY="test", PRUNING_FREQUENCY=None, **plain)
    micro_batches = next(opened.batches())
    assert len(micro_batches) == 2
    for x_BT, y_BT in micro_batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = opened.model(x_BT, y_BT) / 2
        loss.backward()
    expected = torch.stack([p.grad.norm() for p in opened.model.parameters()])
    opened.optimizer.zero_grad()
    measured = optimizer_step(opened, micro_batches, 0.0)
    assert torch.equal(measured.gradient_norms, expected)


def test_progress_is_reported_to_the_end(configure, train):
    """The evaluation and the sample are named while no step is done."""
    singles = {"BATCH_SIZE": 1, "GRAD_ACCUMULATION": 4}
    done = train(configure(SAMPLE_TOKENS=4, EVAL_TOKENS=320, WARMUP_STEPS=12, **singles))
    assert "WARN WARMUP_STEPS=12: the run ends in its warm-up" in done.lines()
    progress = [event for event in done.events if event["kind"] == "progress"]
    assert [(event["iteration"], event["iterations"]) for event in progress] == [
        (i, 12) for i in (3, 6, 9, 12)
    ]
    assert progress[-1]["eta_seconds"] == 0.0 and progress[0]["first_progress"] == 0.0
    losses = [row["loss"] for row in done.rows("train")[9:]]
    assert progress[-1]["loss"] == pytest.approx(sum(losses) / 3)
    assert "TRAIN paper_repro | cpu " in done.lines() and "DONE val loss" in done.lines()
    after = done.events[done.events.index(progress[-1]) :]
    first, *others, last = [event["text"] for event in after if event["kind"] == "doing"]
    assert (first, last) == ("evaluating 0 %", "writing a sample")
    shares = [int(text.split()[1]) for text in others]
    assert shares == sorted(set(shares)) and shares[-1] >= 50
    assert "evaluating" not in done.files.logs.read_text()


def test_the_time_limit_of_a_run_saves_it(configure, train, monkeypatch):
    minutes = count(0, 60)
    monkeypatch.setattr("gpt2.training.records.time.monotonic", lambda: float(next(minutes)))
    stopped = train(configure(RUN_TIME_LIMIT_SECONDS=500))
    assert stopped.status.exit_code == EXIT_TIME_LIMIT
    assert 0 < stopped.status.iteration < 12
    assert "RUN_TIME_LIMIT_SECONDS=500" in stopped.status.message
    assert not stopped.files.weights.exists()
    monkeypatch.undo()
    assert train(configure()).status.state is State.SUCCESS


def test_a_run_without_checkpoints_keeps_the_offsets_of_few_steps(monkeypatch):
    monkeypatch.setattr("gpt2.training.state._MAX_PENDING", 3)
    order, steps = DataOrder(ProcessGroup()), np.arange(10).reshape(5, 2)
    digests = [*accumulate(steps, extend_order_digest, initial=EMPTY_ORDER_DIGEST)]
    for offsets_B in torch.from_numpy(steps):
        order.offered(offsets_B)
        order.consumed()
    assert order.digest == digests[3]
    assert order.state_dict() == digests[5]
