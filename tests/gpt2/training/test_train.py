"""A run from configuration to results, and the invariances of its results."""

import csv
import json
import math
from typing import Any

import pytest
import safetensors.torch
import torch

from gpt2.training.loop import optimizer_step
from gpt2.training.state import TrainingSession
from lib.errors import EXIT_INTERRUPTED, EXIT_TIME_LIMIT
from lib.files import sha256_file
from lib.optim.schedule import learning_rate_at
from lib.runs.run_dir import State, read_status

NO_PRUNING = {"PRUNING_MAGNITUDE": None, "PRUNING_FREQUENCY": None}


def test_a_run_leaves_results_that_agree_with_each_other(configure, trained):
    config, done = configure(), trained
    final = done.summary()["final"]
    weights = safetensors.torch.load_file(done.files.weights)
    with open(done.files.per_query, newline="") as stream:
        documents = list(csv.DictReader(stream))

    assert read_status(done.files).state is State.SUCCESS
    assert not done.files.checkpoints.exists()
    assert final["iterations"] == 12
    assert final["tokens"] == 12 * 4 * 16
    assert final["parameters"] == config.model.num_params()
    assert sum(w.numel() for w in weights.values()) == config.model.num_params()
    tokens = sum(int(d["n_tokens"]) for d in documents)
    losses = math.fsum(float(d["nll_sum"]) for d in documents)
    assert final["val_loss"] == losses / tokens
    assert final["token_accuracy"] == sum(int(d["n_correct"]) for d in documents) / tokens
    assert final["val_perplexity"] == pytest.approx(math.exp(final["val_loss"]))
    assert final["train_loss"] == done.rows("train")[-1]["loss"]
    assert final["val_loss"] < math.log(257)


def test_every_iteration_has_a_row(configure, trained):
    config = configure()
    rows = trained.rows("train")
    assert [row["iteration"] for row in rows] == list(range(1, 13))
    assert [row["progress"] for row in rows] == [i / 12 for i in range(1, 13)]
    assert [row["tokens"] for row in rows] == [i * 64 for i in range(1, 13)]
    rates = [learning_rate_at(config.schedule, i, i / 12, 2 / 12) for i in range(12)]
    assert [row["lr"] for row in rows] == rates
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def test_evaluations_are_recorded_at_their_intervals_and_at_the_end(configure, train, trained):
    rows = trained.rows("eval")
    assert [row["iteration"] for row in rows] == [5, 10, 12]
    assert rows[-1]["val_loss"] == trained.summary()["final"]["val_loss"]
    # An interval that ends with the run yields one row, not two.
    assert [r["iteration"] for r in train(configure(EVAL_INTERVAL=6), "six").rows("eval")] == [
        6,
        12,
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"LOG_INTERVAL": 5, "EVAL_INTERVAL": 0, "CHECKPOINT_INTERVAL": 0, "WARMUP_ITERATIONS": 3},
        {"LOADER_WORKERS": 1, "PREFETCH_FACTOR": 5},
        {"GRAD_CHECKPOINTING": True},
    ],
)
def test_intervals_warm_up_loaders_and_checkpointing_change_no_result(
    configure, train, trained, changes
):
    other = train(configure(**changes))
    assert trained.rows("train") == other.rows("train")
    for name in ("weights", "per_query", "sample"):
        files = [getattr(done.files, name) for done in (trained, other)]
        assert sha256_file(files[0]) == sha256_file(files[1]), name


def test_the_same_configuration_gives_the_same_bytes(configure, train):
    first = train(configure(), "first")
    torch.manual_seed(999)
    second = train(configure(), "second")
    assert first.core() == second.core()
    manifests = [json.loads(done.files.manifest.read_text()) for done in (first, second)]
    assert manifests[0].pop("volatile") != manifests[1].pop("volatile")
    assert manifests[0] == manifests[1]
    assert first.core() != train(configure(SEED=2), "third").core()


def test_the_split_of_a_batch_changes_only_rounding(session):
    shape = {"GLOBAL_BATCH": 8, "DROPOUT": "0.0", **NO_PRUNING, "GRAD_CLIP": "0"}
    found = []
    for size, count in ((8, 1), (4, 2), (1, 8)):
        opened = session(BATCH_SIZE=size, GRAD_ACCUMULATION=count, **shape)
        measured = optimizer_step(opened, next(opened.batches()), 0.0)
        found.append(measured)
    for measured in found[1:]:
        torch.testing.assert_close(measured.loss, found[0].loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(
            measured.gradient_norms, found[0].gradient_norms, rtol=1e-4, atol=1e-7
        )


def test_gradients_are_clipped_and_the_optimizer_receives_the_norm_before(session):
    opened = session(GRAD_CLIP="0.001", DROPOUT="0.0")
    seen = []

    def note(gradient_norm: torch.Tensor) -> None:
        clipped = torch.nn.utils.get_total_norm([p.grad for p in opened.model.parameters()])
        seen.append((gradient_norm, clipped, opened.optimizer.param_groups[0]["lr"]))

    opened.optimizer.step = note
    measured = optimizer_step(opened, next(opened.batches()), 0.125)
    assert measured.gradient_norm > 0.01
    ((before, after, lr),) = seen
    assert before == measured.gradient_norm
    assert lr == 0.125
    torch.testing.assert_close(after, torch.tensor(0.001), rtol=1e-3, atol=0)


def test_the_end_of_a_run_is_named_while_its_steps_are_done(configure, train):
    done = train(configure(SAMPLE_TOKENS=4, BATCH_SIZE=1, GRAD_ACCUMULATION=4, EVAL_TOKENS=320))
    last = max(i for i, event in enumerate(done.events) if event["kind"] == "progress")
    doing = [event["text"] for event in done.events[last:] if event["kind"] == "doing"]
    assert doing[-1] == "writing a sample" and doing[0] == "evaluating 0 %"
    shares = [int(text.split()[1]) for text in doing[:-1]]
    assert shares == sorted(set(shares)) and shares[-1] >= 50
    assert "evaluating" not in done.files.logs.read_text()


def test_progress_is_reported(trained):
    done = trained
    events = [event for event in done.events if event["kind"] == "progress"]
    assert [event["iteration"] for event in events] == [3, 6, 9, 12]
    assert all(event["iterations"] == 12 for event in events)
    assert events[-1]["eta_seconds"] == 0.0
    losses = [row["loss"] for row in done.rows("train")[9:]]
    assert events[-1]["loss"] == pytest.approx(sum(losses) / 3)
    assert "TRAIN paper_repro | cpu " in done.lines() and "DONE val loss" in done.lines()


def test_volatile_values_are_recorded_separately(trained):
    done = trained
    timing = [json.loads(line) for line in done.files.timing.read_text().splitlines()]
    assert [row["iteration"] for row in timing] == [3, 6, 9, 12]
    assert "seconds" not in done.files.metrics.read_text()
    recorded = done.summary()["timing"]
    # Steps 4 to 12: compilation, if any, is in the first line.
    assert recorded["warmup_iterations"] == 3
    assert recorded["warmup_seconds"] == timing[0]["train_seconds"]
    seconds = recorded["train_seconds"] - timing[0]["train_seconds"]
    assert recorded["mean_step_seconds"] == pytest.approx(seconds / 9)
    tokens = 12 * recorded["mean_step_seconds"] * recorded["tokens_per_second"]
    assert tokens == pytest.approx(done.summary()["final"]["tokens"])
    assert set(recorded) == {
        "total_seconds",
        "train_seconds",
        "warmup_iterations",
        "warmup_seconds",
        "mean_step_seconds",
        "tokens_per_second",
        "debug_flags",
        "first_steps",
    }


def test_a_stop_request_saves_and_is_reported(configure, train):
    stopped = train(configure(), stop_at=7)
    assert stopped.status.state is State.INTERRUPTED
    assert stopped.status.exit_code == EXIT_INTERRUPTED
    assert read_status(stopped.files).iteration == 7
    assert not stopped.files.weights.exists()
    assert (stopped.files.checkpoints / "step-00000007").is_dir()


def test_the_time_limit_of_a_run_saves_too(configure, train, monkeypatch):
    minutes = iter(range(0, 10**6, 60))
    monkeypatch.setattr("gpt2.training.records.time.monotonic", lambda: float(next(minutes)))
    stopped = train(configure(RUN_TIME_LIMIT_SECONDS=500))
    assert stopped.status.exit_code == EXIT_TIME_LIMIT
    assert 0 < stopped.status.iteration < 12
    assert "RUN_TIME_LIMIT_SECONDS=500" in stopped.status.message
    monkeypatch.undo()
    assert train(configure()).status.state is State.SUCCESS


def test_the_evaluated_text_does_not_change_training(configure, train, trained):
    other = train(configure(EVAL_TOKENS=120))
    assert trained.rows("train") == other.rows("train")
    assert sha256_file(trained.files.weights) == sha256_file(other.files.weights)
    assert trained.rows("eval") != other.rows("eval")


def test_the_default_seed_is_recorded_and_determines_results(configure, train, trained):
    runs = {1: trained, 7: train(configure(SEED=7))}
    for seed, done in runs.items():
        assert done.manifest()["seeds"]["seed"] == seed
        assert done.summary()["seed"] == seed
        assert f"| seed {seed} |" in done.files.logs.read_text()
    first, second = (done.rows("train")[0] for done in runs.values())
    assert first["loss"] != second["loss"] and first["grad_norm"] != second["grad_norm"]
    digests = [done.manifest()["init_weights_digest"] for done in runs.values()]
    assert digests[0] != digests[1]
    orders = [done.summary()["final"]["data_order_digest"] for done in runs.values()]
    assert orders[0] != orders[1]


def test_rows_have_the_exact_measured_losses(configure, train, monkeypatch):
    measured: list[float] = []

    def noted(session: TrainingSession, *rest: Any) -> Any:
        found = optimizer_step(session, *rest)
        measured.append(found.loss.item())
        return found

    monkeypatch.setattr("gpt2.training.loop.optimizer_step", noted)
    assert [row["loss"] for row in train(configure()).rows("train")] == measured
