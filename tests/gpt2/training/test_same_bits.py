"""A repeated run is bit-identical, also under changes of its environment."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from gpt2.config import Config
from gpt2.training.loop import optimizer_step
from gpt2.training.state import TrainingSession
from lib.files import sha256_file
from tests.gpt2.training.conftest import Trained

Configure = Callable[..., Config]


def test_manifests_differ_in_volatile_fields_only(
    configure: Configure, train: Callable, tmp_path: Path
) -> None:
    manifests = []
    for name in ("one", "another"):
        (tmp_path / name).mkdir()
        done = replace(train, folder=tmp_path / name)(configure())
        manifests.append(done.manifest())
        # Training time depends on the machine.
        manifests[-1]["artifacts"].pop("summary.json", None)
    first, second = manifests
    assert first.pop("volatile") != second.pop("volatile")
    assert first == second


@pytest.mark.parametrize(
    "changes",
    [{"EVAL_TOKENS": 120}, {"LOADER_WORKERS": 2, "PREFETCH_FACTOR": 5}],
    ids=["evaluation", "workers"],
)
def test_evaluation_tokens_and_workers_do_not_change_training(
    configure: Configure, train: Callable, trained: Trained, changes: dict
) -> None:
    plain, other = trained, train(configure(**changes))
    assert plain.rows("train") == other.rows("train")
    assert sha256_file(plain.files.weights) == sha256_file(other.files.weights)
    less = "EVAL_TOKENS" in changes
    assert (plain.rows("eval") != other.rows("eval")) == less


def test_frozen_weights_evaluate_equally_at_any_step(
    session: Callable[..., TrainingSession],
) -> None:
    opened = session(PRUNING_MAGNITUDE=None, PRUNING_FREQUENCY=None)
    first = opened.evaluate(opened.model)
    for micro_batches in islice(opened.batches(), 3):
        optimizer_step(opened, micro_batches, lr=0.0)
    assert opened.evaluate(opened.model).documents == first.documents
    optimizer_step(opened, next(opened.batches()), lr=0.1)
    assert opened.evaluate(opened.model).documents != first.documents


def test_the_default_seed_is_recorded_and_determines_results(
    configure: Configure, train: Callable, trained: Trained
) -> None:
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
